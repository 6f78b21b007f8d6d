"""Data for training: tokenizers, token files of corpora, and datasets of their samples."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "blend": "open_dataset",
        "corpus": "build",
        "dataset": "IGNORE_INDEX TokenDataset",
        "masked": "MaskedDataset",
        "tokenize": "ByteTokenizer FileTokenizer load_tokenizer train_bpe",
    },
)
