"""Token files: a directory that appears whole or not at all, and says what is wrong when it is damaged.

index.json          what is below, with its own checksum
train.bin           token ids, little-endian uint16 or uint32; every document begins with end-of-text
train.documents     int64 offsets of the documents in train.bin, and its number of tokens
validation.bin, validation.documents    the held-out text; absent if none was held out
tokenizer.json      absent for the byte tokenizer
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastmp.train.tokenize import BpeTokenizer, ByteTokenizer, TokenIds, Tokenizer, unigram_entropy

FORMAT = "fastmp-tokens-1"
INDEX_LIMIT = 1 << 20  # bytes; an index is about 1 kB whatever the size of the data
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class SplitInfo:
    """One split as the index describes it. `unigram_entropy` is that of its bytes, in nats per byte."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    max_token: int
    tokens_crc32: int
    documents_crc32: int
    unigram_entropy: float

    @property
    def bytes_per_token(self) -> float:
        """Bytes per predicted token (all but the first of the split): nats/byte = nats/token / this."""
        return self.num_bytes / (self.num_tokens - 1)


@dataclass(frozen=True)
class Index:
    """index.json. `source` is the builder's note of where the text came from."""

    dtype: str
    vocab_size: int
    tokenizer: str
    tokenizer_crc32: int
    source: dict[str, Any]
    splits: dict[str, SplitInfo]

    def to_json(self) -> str:
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"crc32": _crc_of(content), "content": content}, indent=1)


class SplitWriter:
    """Appends documents to the files of one split in an unfinished directory."""

    def __init__(self, directory: Path, name: str, tokenizer: Tokenizer) -> None:
        self._directory, self._name, self._tokenizer = directory, name, tokenizer
        self._dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
        self._file = (directory / f"{name}.bin").open("wb")
        self._offsets = [0]
        self._crc = self._num_bytes = self._max_token = 0
        self._histogram = np.zeros(256, np.int64)

    def add(self, text: bytes, ids: TokenIds) -> None:
        """Append a document. ValueError if ids leave the vocabulary or do not stand for all of `text`."""
        vocab_size = self._tokenizer.vocab_size
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            bad = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise ValueError(f"token id {bad} is beyond the vocabulary of {vocab_size}")
        if (covered := int(self._tokenizer.token_lengths[ids].sum())) != len(text):
            raise ValueError(
                f"its tokens stand for {covered} bytes, not its {len(text)}: the tokenizer is not lossless"
            )
        piece = np.concatenate(([self._tokenizer.end_of_text], ids)).astype(self._dtype)
        self._file.write(memoryview(piece).cast("B"))
        self._crc = zlib.crc32(memoryview(piece).cast("B"), self._crc)
        self._max_token = max(self._max_token, int(piece.max()))
        self._num_bytes += len(text)
        self._histogram += np.bincount(np.frombuffer(text, np.uint8), minlength=256)
        self._offsets.append(self._offsets[-1] + piece.size)

    def finish(self) -> SplitInfo:
        """Write the document offsets, force both files to disk, and describe them."""
        sync_and_close(self._file)
        offsets = np.array(self._offsets, "<i8").tobytes()
        write_synced(self._directory / f"{self._name}.documents", offsets)
        return SplitInfo(
            num_tokens=self._offsets[-1],
            num_documents=len(self._offsets) - 1,
            num_bytes=self._num_bytes,
            max_token=self._max_token,
            tokens_crc32=self._crc,
            documents_crc32=zlib.crc32(offsets),
            unigram_entropy=unigram_entropy(self._histogram),
        )

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Split:
    """One split, memory-mapped: `tokens` (num_tokens,), `documents` (num_documents + 1,) offsets into it."""

    path: Path
    info: SplitInfo
    tokens: npt.NDArray[Any]
    documents: npt.NDArray[np.int64]


def dtype_for(vocab_size: int) -> str:
    if vocab_size > 1 << 32:
        raise ValueError(f"token files: a vocabulary of {vocab_size} does not fit in uint32")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(directory: Path) -> Index:
    """Read and check `directory`/index.json; ValueError names the file and what is wrong with it."""
    path = directory / "index.json"
    try:
        with path.open("rb") as file:
            raw = file.read(INDEX_LIMIT + 1)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: not found, so {directory} is not a token dataset (fastmp data build)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) > INDEX_LIMIT:
        raise ValueError(f"{path}: damaged: larger than any index ({INDEX_LIMIT} bytes)")
    try:
        document = json.loads(raw)
        content, crc = document["content"], document["crc32"]
        intact = _crc_of(content) == crc
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path}: damaged: not an index in JSON") from None
    if not intact:
        raise ValueError(f"{path}: damaged: its checksum does not match its content")
    try:
        return _index_of(content)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{path}: damaged: {error}") from None


def open_split(directory: Path, index: Index, name: str) -> Split:
    """Map one split; ValueError names the file that is missing, cut short or inconsistent with the index."""
    info, dtype = index.splits[name], DTYPES[index.dtype]
    path = directory / f"{name}.bin"
    tokens = _map(path, dtype, info.num_tokens)
    documents = _map(directory / f"{name}.documents", np.dtype("<i8"), info.num_documents + 1)
    if documents[0] != 0 or documents[-1] != info.num_tokens:
        raise ValueError(
            f"{directory / name}.documents: damaged: offsets do not run from 0 to {info.num_tokens}"
        )
    return Split(path, info, tokens, documents)


def open_tokenizer(directory: Path, index: Index) -> Tokenizer:
    """The tokenizer the files were written with; ValueError if its file is missing or is another one."""
    if index.tokenizer == "byte":
        return ByteTokenizer()
    path = directory / "tokenizer.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if zlib.crc32(raw) != index.tokenizer_crc32:
        raise ValueError(
            f"{path}: damaged, or not the tokenizer this dataset was written with: wrong checksum"
        )
    tokenizer = BpeTokenizer(raw.decode(), source=str(path))
    if tokenizer.vocab_size != index.vocab_size:
        raise ValueError(f"{path}: has {tokenizer.vocab_size} tokens, the index says {index.vocab_size}")
    return tokenizer


def verify(split: Split) -> None:
    """Read a whole split and compare checksums; ValueError names the damaged file (one bit is enough)."""
    for path, data, crc in (
        (split.path, split.tokens, split.info.tokens_crc32),
        (split.path.with_suffix(".documents"), split.documents, split.info.documents_crc32),
    ):
        running, view = 0, memoryview(data).cast("B")
        for begin in range(0, len(view), 1 << 24):
            running = zlib.crc32(view[begin : begin + (1 << 24)], running)
        if running != crc:
            raise ValueError(f"{path}: damaged: checksum {running:08x}, the index says {crc:08x}")


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new directory beside `out` that becomes `out` when the block ends, and vanishes if it raises.

    FileExistsError if something stands at `out` by then: the first of several builders wins. A builder holds
    a lock on its directory; one that nobody holds was left by a killed builder, and the next one removes it.
    """
    prefix = f".{out.name}.building-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for leftover in out.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), _locked(leftover, fcntl.LOCK_NB):
            shutil.rmtree(leftover)
    with contextlib.ExitStack() as held:
        stage = None
        while stage is None or not stage.exists():  # taken for a leftover before it was locked: once more
            stage = out.parent / f"{prefix}{secrets.token_hex(8)}"
            stage.mkdir()
            held.callback(shutil.rmtree, stage, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(_locked(stage))
        yield stage
        sync_directory(stage)
        try:
            os.rename(stage, out)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(error.errno, error.strerror, str(out)) from None
            raise
        sync_directory(out.parent)


@contextlib.contextmanager
def _locked(directory: Path, flags: int = 0) -> Iterator[None]:
    """Hold the lock of `directory`; with LOCK_NB, OSError if that cannot be had at once.

    A file system that cannot lock a directory (NFS) does without: then nobody takes it for a leftover either.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        except OSError:
            if flags:
                raise
        yield
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    file = path.open("wb")
    try:
        file.write(data)
        sync_and_close(file)
    finally:
        file.close()


def sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            state = "cut short" if size < count * dtype.itemsize else "too long"
            raise ValueError(f"{path}: {state}: {size} bytes, the index says {count * dtype.itemsize}")
        return np.memmap(path, dtype, mode="r", shape=(count,))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _index_of(content: Any) -> Index:
    """The Index of a parsed `content`; ValueError, TypeError or KeyError on anything unexpected."""
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, this version reads {FORMAT!r}")
    vocab_size = _integer(content, "vocab_size", 1, 1 << 32)
    if content["dtype"] != dtype_for(vocab_size):
        raise ValueError(f"dtype {content['dtype']!r} does not go with a vocabulary of {vocab_size}")
    if content["tokenizer"] not in (ByteTokenizer.name, BpeTokenizer.name):
        raise ValueError(f"unknown tokenizer {content['tokenizer']!r}")
    if content["tokenizer"] == ByteTokenizer.name and vocab_size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size} is not that of the byte tokenizer, {ByteTokenizer.vocab_size}"
        )
    if not isinstance(content["source"], dict) or not isinstance(content["splits"], dict):
        raise ValueError("source and splits must be objects")
    if set(content["splits"]) not in ({"train"}, {"train", "validation"}):
        raise ValueError(f"splits are {sorted(content['splits'])}, not train and validation")
    return Index(
        dtype=content["dtype"],
        vocab_size=vocab_size,
        tokenizer=content["tokenizer"],
        tokenizer_crc32=_integer(content, "tokenizer_crc32", 0, (1 << 32) - 1),
        source=content["source"],
        splits={name: _split_of(raw, vocab_size) for name, raw in content["splits"].items()},
    )


def _split_of(raw: Any, vocab_size: int) -> SplitInfo:
    if set(raw) != {field.name for field in fields(SplitInfo)}:
        raise ValueError("a split does not have the expected fields")
    entropy = raw["unigram_entropy"]
    if not isinstance(entropy, float | int) or not math.isfinite(entropy) or entropy < 0:
        raise ValueError(f"unigram_entropy {entropy!r} is not a number of nats")
    info = SplitInfo(
        num_tokens=_integer(raw, "num_tokens", 2, 1 << 56),
        num_documents=_integer(raw, "num_documents", 1, 1 << 56),
        num_bytes=_integer(raw, "num_bytes", 1, 1 << 56),
        max_token=_integer(raw, "max_token", 0, 1 << 32),
        tokens_crc32=_integer(raw, "tokens_crc32", 0, (1 << 32) - 1),
        documents_crc32=_integer(raw, "documents_crc32", 0, (1 << 32) - 1),
        unigram_entropy=float(entropy),
    )
    if info.max_token >= vocab_size:
        raise ValueError(f"token id {info.max_token} is beyond the vocabulary of {vocab_size}")
    return info


def _integer(content: Any, name: str, low: int, high: int) -> int:
    value = content[name]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} {value!r} is not an integer from {low} to {high}")
    return value
