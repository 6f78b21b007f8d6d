"""The documents of any source as text: of files, of token directories, and of corpora of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastmp.config.data_files import is_megatron
from fastmp.training.data.corpus import find_documents
from fastmp.training.data.megatron import open_splits
from fastmp.training.data.ngrams import Texts
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index
from fastmp.training.data.tokenize import load_tokenizer


def texts_of(source: str, tokenizer: str = "byte") -> Texts:
    """Return a function that yields all documents of a file pattern, a token directory or Megatron's files.

    tokenizer: that of Megatron's files. ValueError names what is missing or damaged.
    """
    if is_megatron(source):
        return _megatron(source, tokenizer)
    if (Path(source) / "index.json").is_file():
        return _token_files(Path(source))
    documents = find_documents([source])
    return lambda: (document.text() for document in documents)


def _megatron(prefix: str, name: str) -> Texts:
    tokenizer = load_tokenizer(name)
    split, _ = open_splits(prefix, tokenizer, 0.0)

    def texts() -> Iterator[bytes]:
        for number in range(split.info.num_documents):
            begin, end = split.files.starts(number, number + 2).tolist()
            yield tokenizer.decode_bytes(split.read(begin, end))

    return texts


def _token_files(directory: Path) -> Texts:
    index = read_index(directory)
    tokenizer = open_tokenizer(directory, index)
    splits = [open_split(directory, index, name) for name in index.splits]

    def texts() -> Iterator[bytes]:
        for split in splits:
            for number in range(split.info.num_documents):
                begin, end = split.documents[number : number + 2].tolist()
                yield tokenizer.decode_bytes(split.read(begin, end))

    return texts
