"""N-grams of words as 64-bit hashes, and the share of one text's n-grams that occur in another.

A word is a run of letters and digits of any script, lower-cased; n words in a row are an n-gram, within one
document. So Radford et al. (2019) count the 8-grams of a test set that its training text has, and Shoeybi et
al. (2019) report 10.8 % for WikiText-103. Hashes are polynomials over the bytes of a word and over the words
of an n-gram, modulo 2^64 and mixed: chance makes two different ones equal in one of 2^64 pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.megatron_paper.corpus import NGRAM
from fastmp.config.data_files import is_megatron
from fastmp.training.data.corpus import find_documents
from fastmp.training.data.dataset import open_corpus
from fastmp.training.data.sampling import mix

HASHES_AT_ONCE = 1 << 26  # n-grams held of the text that is looked up: 0.5 GiB, and as much to sort them
_BYTE = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2^64
_WORD = np.uint64(0xD6E8FEB86659FD93)
_ASCII = bytes(ord(chr(c).lower()) if chr(c).isalnum() and c < 128 else 0x20 for c in range(256))
_NO_WORD = re.compile(r"[\W_]+")
_TABLE_BITS = 22
_LONGEST_TABLE = 1 << 22  # powers that are kept

Hashes = npt.NDArray[np.uint64]
_powers_of: dict[int, Hashes] = {}
Texts = Callable[[], Iterable[bytes]]  # the documents, from the first one on at every call


def ngram_hashes(text: bytes, n: int = NGRAM) -> Hashes:
    """Return the hashes of all n-grams of `text` in order: (max(0, words - n + 1),) uint64.

    Bytes that are not UTF-8 separate words.
    """
    words = _word_hashes(_words(text))
    if len(words) < n:
        return np.empty(0, np.uint64)
    sums = np.zeros(len(words) - n + 1, np.uint64)
    for place in range(n):
        sums = sums * _WORD + words[place : place + len(sums)]
    return mix(sums)


def _words(text: bytes) -> bytes:
    """Return the words of `text`, lower-cased, in UTF-8, separated by spaces."""
    if text.isascii():
        return text.translate(_ASCII)
    return _NO_WORD.sub(" ", text.decode("utf-8", "replace").lower()).encode()


def _word_hashes(words: bytes) -> Hashes:
    """Return a hash of each word; words are separated by spaces."""
    data = np.frombuffer(words, np.uint8)
    inside = np.concatenate([[False], data != 0x20, [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    begins, ends = edges[::2], edges[1::2]
    terms = (data.astype(np.uint64) + np.uint64(1)) * _powers(_BYTE, data.size)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
    inverse = _powers(pow(_BYTE, -1, 1 << 64), data.size)  # takes back the place of the word in the text
    return mix((sums[ends] - sums[begins]) * inverse[begins])


def _powers(base: int, count: int) -> Hashes:
    """Return base^0 to base^(count - 1) modulo 2^64, from a growing table."""
    powers = _powers_of.get(base, np.ones(1, np.uint64))
    while len(powers) < count:
        powers = np.concatenate([powers, powers * np.uint64(pow(base, len(powers), 1 << 64))])
    if len(powers) <= _LONGEST_TABLE:
        _powers_of[base] = powers
    return powers[:count]


class HashSet:
    """A sorted set of hashes for bulk lookup; a table of prefixes rejects most misses."""

    def __init__(self, hashes: Hashes) -> None:
        self.values, self.counts = np.unique(hashes, return_counts=True)
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._table[self.values >> np.uint64(64 - _TABLE_BITS)] = True

    def find(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Return the indices in `values` of the `hashes` that are in the set."""
        likely = hashes[self._table[hashes >> np.uint64(64 - _TABLE_BITS)]]
        places = np.searchsorted(self.values, likely)
        places[places == len(self.values)] = 0
        return places[self.values[places] == likely] if len(self.values) else places[:0]


@dataclass(frozen=True)
class NgramOverlap:
    """The overlap of two texts: n-grams, distinct n-grams, and documents with any of them."""

    ngrams: int
    ngrams_found: int
    different: int
    different_found: int
    documents: int
    documents_found: int

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "share": self.ngrams_found / max(1, self.ngrams)}


def overlap(a: Texts, b: Texts, n: int = NGRAM, *, hashes_at_once: int = HASHES_AT_ONCE) -> NgramOverlap:
    """Count the n-grams of the documents `a` that occur in the documents `b`, up to hash collisions.

    Of `a` at most about `hashes_at_once` are held: where it has more, both texts are read several times, and
    each time hashes of one range are looked at. Of `b` a document is held.
    """
    total = documents = 0
    for text in a():
        total += len(ngram_hashes(text, n))
        documents += 1
    passes = max(1, -(-total // hashes_at_once))
    touched = np.zeros(documents, np.bool_)
    found = different = different_found = 0
    for number in range(passes):

        def here(text: bytes, number: int = number) -> Hashes:
            hashes = ngram_hashes(text, n)
            return hashes[(hashes >> np.uint64(32)) * np.uint64(passes) >> np.uint64(32) == number]

        known = HashSet(np.concatenate([np.empty(0, np.uint64), *map(here, a())]))
        seen = np.zeros(len(known.values), np.bool_)
        for text in b():
            seen[known.find(here(text))] = True
        different += len(seen)
        different_found += int(seen.sum())
        found += int(known.counts[seen].sum())
        common = HashSet(known.values[seen])
        for document, text in enumerate(a()):
            touched[document] |= len(common.find(here(text))) > 0
    return NgramOverlap(total, found, different, different_found, documents, int(touched.sum()))


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
