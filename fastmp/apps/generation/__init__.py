"""Text from trained models: a batch of prompts at once, on any layout but context parallelism."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "incremental": "Decoder",
        "trained_models": "load_model open_weights",
        "batched": "Continuation Generated generate",
    },
)
