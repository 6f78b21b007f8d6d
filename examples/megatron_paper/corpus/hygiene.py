"""Filter documents of a corpus: contamination and near-duplicates.

Contamination: a document is excluded if a tenth or more of its n-grams of NGRAM words occur in given files,
such as the pages that a test set was taken from.

Near-duplicates: MinHash signatures (Broder 1997) of word 5-grams are hashed by bands, so that 99 % of pairs
at the threshold collide (LSH; Indyk and Motwani 1998). Of documents that collide and agree in more slots than
the threshold, the first stays. The share of equal slots estimates the Jaccard similarity of the sets, with a
standard deviation of 0.04.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.megatron_paper.corpus.ngrams import Hashes, HashSet, ngram_hashes
from fastmp.training.data.corpus import Document, Select, find_documents
from fastmp.training.data.progress import ProgressLine, groups
from fastmp.training.data.sampling import mix

EXCLUDED_SHARE = 0.1
SHINGLE = 5  # words
SLOTS = 128  # of a signature, of 4 bytes each
SEED = 1
HASHES_AT_ONCE = 1 << 20

Signatures = npt.NDArray[np.uint32]


def hygiene(exclude: Sequence[str] = (), dedup_jaccard: float | None = None) -> Select:
    """Return a filter for `build`.

    Args:
        exclude: patterns of files; documents that overlap them are left out.
        dedup_jaccard: similarity above which a document that resembles an earlier one is left out.

    Raises:
        ValueError: `dedup_jaccard` is not between 0 and 1, or rensa is not installed.
    """
    if dedup_jaccard is not None:
        if not 0.0 < dedup_jaccard < 1.0:
            raise ValueError(f"dedup_jaccard must be between 0 and 1, got {dedup_jaccard}")
        minhash()  # raises now rather than after minutes
    return partial(_select, exclude, dedup_jaccard)


def _select(
    exclude: Sequence[str], dedup_jaccard: float | None, documents: Sequence[Document], progress: ProgressLine
) -> tuple[list[Document], dict[str, Any]]:
    """Return the documents to keep, and for the index the options and the numbers of dropped documents."""
    files = excluded_by(document.text() for document in (find_documents(exclude) if exclude else ()))
    kept: list[Document] = list(documents)
    num_excluded = 0
    if exclude or dedup_jaccard is not None:
        kept = []

        def sets() -> Iterator[Hashes]:
            for document in documents:
                text = document.text()
                if not (exclude and is_excluded(text, files)):
                    kept.append(document)
                    if dedup_jaccard is not None:
                        yield shingles(text)
                progress.add(document.num_bytes)

        total = sum(document.num_bytes for document in documents)
        progress.begin("looking for overlap and near-duplicates", total)
        made = signatures(sets())
        num_excluded = len(documents) - len(kept)
        if dedup_jaccard is not None:
            dropped = near_duplicates(made, dedup_jaccard)
            kept = [document for document, drop in zip(kept, dropped) if not drop]
        if not kept:
            raise ValueError(f"all {len(documents)} documents overlap the excluded files")
    return kept, {
        "dedup_jaccard": dedup_jaccard,
        "exclude": list(exclude),
        "num_excluded": num_excluded,
        "num_near_duplicates": len(documents) - num_excluded - len(kept),
    }


def excluded_by(texts: Iterable[bytes]) -> HashSet:
    """Return the n-grams of the files that a corpus must not contain."""
    return HashSet(np.concatenate([np.empty(0, np.uint64), *map(ngram_hashes, texts)]))


def is_excluded(text: bytes, files: HashSet) -> bool:
    """Return True if a tenth of the n-grams of `text` are in `files`; False without n-grams."""
    hashes = ngram_hashes(text)
    return len(hashes) > 0 and len(files.find(hashes)) >= EXCLUDED_SHARE * len(hashes)


def shingles(text: bytes) -> Hashes:
    """Return the hashes of a signature: word 5-grams; of a short text, all its words, or its bytes."""
    for words in range(SHINGLE, 0, -1):
        if len(hashes := ngram_hashes(text, words)):
            return hashes
    return np.array([zlib.crc32(text)], np.uint64)


def signatures(sets: Iterable[Hashes]) -> Signatures:
    """Return the MinHash signatures (number of sets, SLOTS) of sets of hashes.

    Raises ValueError if rensa is not installed.
    """
    parts = [np.empty((0, SLOTS), np.uint32)]
    for group in groups(sets, HASHES_AT_ONCE, len):
        ends = np.cumsum([0, *map(len, group)]).astype(np.uint64)
        made = minhash().digest_matrix_from_flat_token_hashes(np.concatenate(group), ends, SLOTS, SEED)
        parts.append(np.array(made.to_rows(), np.uint32).reshape(-1, SLOTS))
    return np.concatenate(parts)


def near_duplicates(signatures_NK: Signatures, jaccard: float) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of rows that share more than `jaccard` of their slots with an earlier kept row.

    Rows are visited in order: a row that resembles only dropped rows stays.
    """
    members, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]  # of groups that meet; where these end
    rows, count = _rows_of_a_band(jaccard), 0
    for first in range(0, SLOTS, rows):
        keys = np.zeros(len(signatures_NK), np.uint64)
        for slot in range(first, first + rows):
            keys = mix(keys ^ signatures_NK[:, slot].astype(np.uint64))
        order = np.argsort(keys, kind="stable")  # rows that meet, in their order
        borders = np.concatenate([[0], np.flatnonzero(np.diff(keys[order])) + 1, [len(order)]])
        sizes = np.diff(borders)
        members.append(order[np.repeat(sizes > 1, sizes)])
        sizes = sizes[sizes > 1]
        ends.append(np.repeat(count + np.cumsum(sizes), sizes))
        count += len(members[-1])

    dropped = np.zeros(len(signatures_NK), np.bool_)
    member, end = np.concatenate(members), np.concatenate(ends)
    for place in np.argsort(member, kind="stable"):
        one = member[place]
        if not dropped[one]:
            later = member[place + 1 : end[place]]
            later = later[~dropped[later]]
            share = (signatures_NK[later] == signatures_NK[one]).mean(axis=1)
            dropped[later[share > jaccard]] = True
    return dropped


def _rows_of_a_band(jaccard: float) -> int:
    """Return the largest band size at which 99 % of pairs of this similarity collide."""
    for rows in (32, 16, 8, 4, 2):
        if (1 - jaccard**rows) ** (SLOTS // rows) <= 0.01:
            return rows
    return 1


def minhash() -> Any:
    """Return rensa's MinHash class. Raises ValueError if rensa is not installed."""
    try:
        import rensa
    except ImportError:
        raise ValueError("dedup_jaccard needs the rensa library: pip install rensa") from None
    return rensa.RMinHash
