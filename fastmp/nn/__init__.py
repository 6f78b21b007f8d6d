"""Model parts for tensor parallelism: segments, attention, MLP, transformer layer, recomputation, GPT."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Segment": "segment",
    "SegmentedLayer": "segment",
    "SelfAttention": "attention",
    "MLP": "mlp",
    "TransformerLayer": "transformer",
    "GPT": "models",
    "flops_per_token": "models",
    "num_parameters": "models",
    "pad_vocab": "models",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
