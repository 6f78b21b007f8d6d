"""Training: data, tokenizers, schedule, loop, checkpoints, metrics. Names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "BpeTokenizer": "fastmp.train.tokenize",
    "ByteTokenizer": "fastmp.train.tokenize",
    "RunInfo": "fastmp.train.metrics",
    "TokenDataset": "fastmp.train.data",
    "TrainLog": "fastmp.train.metrics",
    "Trainer": "fastmp.train.trainer",
    "build": "fastmp.train.corpus",
    "generate": "fastmp.train.generate",
    "generate_text": "fastmp.train.generate",
    "load_tokenizer": "fastmp.train.tokenize",
    "plot_loss": "fastmp.train.plot",
    "read_metrics": "fastmp.train.metrics",
    "warmup_cosine": "fastmp.train.lr",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'fastmp.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
