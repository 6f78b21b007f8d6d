"""Facts of data directories that are known before torch is imported. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path

from fastmp.config.file_access import FOREIGN_ERRORS, read_file
from fastmp.config.training import DataConfig

__all__ = ["INDEX_LIMIT", "TOKENIZER_LIMIT", "expected_vocab_size", "is_megatron", "megatron_file"]

TOKENIZER_LIMIT = 1 << 28  # bytes of a file; those of 256,000 tokens have about 35 MB
INDEX_LIMIT = 1 << 20  # bytes; the index of token files is about 1 kB whatever the size of the data
VOCAB_SIZES = {"byte": 257, "bpe": 4096}  # of the built-in tokenizers; bpe learns fewer where text is short
MASKED_LM_TOKENS = 4  # [CLS], [SEP], [MASK] and [PAD], which these do not have


def expected_vocab_size(data: DataConfig) -> int:
    """Return the vocabulary size of `data`; 0 if its index or its tokenizer's file cannot be read.

    Of the special tokens of masked samples, a tokenizer.json is taken to have all, as BERT's has.
    """
    path = data.first_path
    if path is None or is_megatron(path):
        tokenizer = data.tokenizer
        size = VOCAB_SIZES.get(tokenizer) or _tokenizer_vocab_size(Path(tokenizer))
    else:
        try:
            index = json.loads(read_file(Path(path) / "index.json", INDEX_LIMIT).decode())["content"]
            size, tokenizer = index["vocab_size"], index.get("tokenizer")
        except (OSError, *FOREIGN_ERRORS):
            return 0
        if type(size) is not int:
            return 0
    has_none = data.masked_lm is not None and tokenizer in VOCAB_SIZES
    return size + MASKED_LM_TOKENS if has_none else size


def _tokenizer_vocab_size(path: Path) -> int:
    """Return the highest id in a tokenizer.json, or in that of a directory, plus one; 0 if unreadable."""
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        content = json.loads(read_file(file, TOKENIZER_LIMIT))
        vocab = content["model"]["vocab"]  # {token: id}; of a unigram model, [token, score] in order of ids
        ids = [len(vocab) - 1] if isinstance(vocab, list) else [int(i) for i in vocab.values()]
        return max([*ids, *(int(added["id"]) for added in content["added_tokens"])]) + 1
    except (OSError, *FOREIGN_ERRORS):
        return 0


def is_megatron(path: str | Path) -> bool:
    """Return True if a Megatron-LM corpus has this prefix, which may end with .bin or .idx."""
    return megatron_file(path, ".idx").is_file() and not Path(path).is_dir()


def megatron_file(path: str | Path, suffix: str) -> Path:
    """Return PREFIX.bin or PREFIX.idx for a prefix, which may contain dots, or for either file."""
    path = Path(path)
    return path.with_suffix(suffix) if path.suffix in (".bin", ".idx") else path.with_name(path.name + suffix)
