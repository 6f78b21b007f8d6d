"""The documents of any source as text: of files, of token directories, and of corpora of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastmp.config.data_files import is_megatron
from fastmp.training.data.corpus import find_documents
from fastmp.training.data.dataset import open_corpus
from fastmp.training.data.ngrams import Texts


def texts_of(source: str, tokenizer: str = "byte") -> Texts:
    """Return a function that yields all documents of a file pattern, a token directory or Megatron's files.

    Args:
        source: the pattern, the directory, or the prefix of Megatron's files.
        tokenizer: that of Megatron's files.

    Raises:
        ValueError: a file is missing or damaged.
    """
    if not is_megatron(source) and not (Path(source) / "index.json").is_file():
        documents = find_documents([source])
        return lambda: (document.text() for document in documents)
    corpus = open_corpus(source, tokenizer, 0.0)
    splits = [corpus.train] if corpus.validation is None else [corpus.train, corpus.validation]

    def texts() -> Iterator[bytes]:
        for split in splits:
            for number in range(split.info.num_documents):
                (begin,), (length,) = split.texts(np.array([number]))
                yield corpus.tokenizer.decode_bytes(split.read(int(begin), int(begin + length)))

    return texts
