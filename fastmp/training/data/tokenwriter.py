"""Write token files: splits document by document, in a directory that is published with one rename.

`tokenfile` defines their format and reads them. A killed builder leaves its directory, from which the next
build of the same job continues.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastmp.config.file_access import (
    open_directory,
    open_writable,
    read_file,
    replace_text,
    sync_and_close,
    sync_directory,
    write_synced,
)
from fastmp.training.data.tokenfile import BLOCK_BYTES, DTYPES, SplitInfo, dtype_for
from fastmp.training.data.tokenize import TokenIds, Tokenizer, unigram_entropy

__all__ = ["STATE", "SplitWriter", "staged"]

_JOB = "job"  # in an unfinished directory
STATE = "state.json"  # there, where a builder can go on from it


class _BlockChecksums:
    """The CRC-32 of each block of a file, from its bytes in order."""

    def __init__(self) -> None:
        self._blocks = array.array("I")
        self._crc = self._filled = 0

    def add(self, data: memoryview) -> None:
        while data:
            part = data[: BLOCK_BYTES - self._filled]
            data = data[len(part) :]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> bytes:
        """Return the content of the file of checksums."""
        if self._filled:
            self._end_block()
        return np.array(self._blocks, "<u4").tobytes()

    def _end_block(self) -> None:
        self._blocks.append(self._crc)
        self._crc = self._filled = 0


class SplitWriter:
    """Appends documents to the files of one split in an unfinished directory."""

    def __init__(
        self, directory: Path, name: str, tokenizer: Tokenizer, saved: dict[str, Any] | None = None
    ) -> None:
        """Continue from `saved`, the result of `save` in an interrupted process, if it is given."""
        self._directory, self._name, self._tokenizer = directory, name, tokenizer
        self._dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
        path = directory / f"{name}.bin"
        self._offsets = array.array("q", [0])
        self._num_saved = 0  # offsets that lie in the file
        self._checksums = _BlockChecksums()
        self._num_bytes = self._num_changed = self._max_token = 0
        self._histogram = np.zeros(256, np.int64)
        if saved:
            try:
                self._file = open_writable(path, "r+b")
                self._restore(saved)
            except FileNotFoundError as error:
                raise self._damaged("its files", f"{Path(error.filename).name} missing") from None
        else:
            self._file = open_writable(path, "wb")

    def save(self) -> dict[str, Any]:
        """Force to disk what has been added, and describe it in plain values for `saved`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        with self._documents_file() as file:
            os.fsync(file.fileno())
        return {
            "num_offsets": len(self._offsets),
            "num_bytes": self._num_bytes,
            "num_changed": int(self._num_changed),
            "max_token": self._max_token,
            "histogram": self._histogram.tolist(),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        """Restore files and counts to the state `saved`, truncating what was written later."""
        self._num_saved = saved["num_offsets"]
        raw = read_file(self._directory / f"{self._name}.documents", 1 << 40)
        if len(raw) < 8 * self._num_saved:
            raise self._damaged(f"{self._num_saved} offsets", f"{len(raw)} bytes")
        offsets = np.frombuffer(raw, "<i8", self._num_saved)
        self._offsets = array.array("q", offsets.astype(np.int64).tobytes())
        size, wanted = os.fstat(self._file.fileno()).st_size, self._offsets[-1] * self._dtype.itemsize
        if size < wanted:  # truncating would add zeros
            raise self._damaged(f"{wanted} bytes of tokens", f"{size}")
        self._file.truncate(wanted)
        while data := self._file.read(BLOCK_BYTES):
            self._checksums.add(memoryview(data))
        self._num_bytes, self._num_changed = saved["num_bytes"], saved["num_changed"]
        self._max_token = saved["max_token"]
        self._histogram = np.array(saved["histogram"], np.int64)

    def _damaged(self, expected: str, got: str) -> ValueError:
        return ValueError(
            f"{self._directory}: expected {expected} of an unfinished build, got {got}; delete it"
        )

    @contextlib.contextmanager
    def _documents_file(self) -> Iterator[Any]:
        """Yield the file of offsets after appending the unsaved ones; flushed, not yet synced."""
        path = self._directory / f"{self._name}.documents"
        with open_writable(path, "r+b" if self._num_saved else "wb") as file:
            file.seek(8 * self._num_saved)
            file.write(np.array(self._offsets[self._num_saved :], "<i8").tobytes())
            file.truncate()
            file.flush()
            yield file
        self._num_saved = len(self._offsets)

    def add(self, text: bytes, ids: TokenIds) -> None:
        """Append a document. Raises ValueError if ids leave the vocabulary."""
        vocab_size = self._tokenizer.vocab_size
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            bad = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise ValueError(f"token id {bad} is beyond the vocabulary of {vocab_size}")
        piece = np.concatenate(([self._tokenizer.end_of_text], ids)).astype(self._dtype)
        self._file.write(piece.data.cast("B"))
        self._checksums.add(piece.data.cast("B"))
        self._max_token = max(self._max_token, int(piece.max()))
        self._num_bytes += len(text)
        self._num_changed += self._tokenizer.decode_bytes(ids) != text
        self._histogram += np.bincount(np.frombuffer(text, np.uint8), minlength=256)
        self._offsets.append(self._offsets[-1] + piece.size)

    @property
    def num_documents(self) -> int:
        return len(self._offsets) - 1

    def finish(self) -> SplitInfo:
        """Write offsets and checksums, force all three files to disk, and describe them."""
        sync_and_close(self._file)
        offsets, checksums = np.array(self._offsets, "<i8").tobytes(), self._checksums.finish()
        with self._documents_file() as file:
            os.fsync(file.fileno())
        write_synced(self._directory / f"{self._name}.checksums", checksums)
        return SplitInfo(
            num_tokens=self._offsets[-1],
            num_documents=len(self._offsets) - 1,
            num_bytes=self._num_bytes,
            num_changed=self._num_changed,
            max_token=self._max_token,
            checksums_crc32=zlib.crc32(checksums),
            documents_crc32=zlib.crc32(offsets),
            unigram_entropy=unigram_entropy(self._histogram),
        )

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def staged(out: Path, *, replace: bool = False, job: str = "") -> Iterator[Path]:
    """Make a directory next to `out`, rename it to `out` at the end of the block, or delete it on errors.

    A killed builder leaves its directory, and so does an interrupted one that has saved a STATE; the next
    builder with the same `job`, which names all inputs of the result, continues in it, and one with another
    job removes it. Builders lock their directories, so an unlocked one was left behind.

    Raises FileExistsError if `out` exists by then (the first of several builders wins), unless `replace` is
    set: then the old one is moved away and deleted.
    """
    prefix = f".{out.name}.building-"
    out.parent.mkdir(parents=True, exist_ok=True)
    remove: list[Path] = []

    def clean_up() -> None:
        for directory in remove:
            shutil.rmtree(directory, ignore_errors=True)

    with contextlib.ExitStack() as held:
        held.callback(clean_up)
        stage = None
        for leftover in sorted(out.parent.glob(f"{glob.escape(prefix)}*")):
            with contextlib.suppress(OSError), contextlib.ExitStack() as lock:
                lock.enter_context(_locked(leftover, fcntl.LOCK_NB))
                if stage is None and job and _job_of(leftover) == job:
                    stage = leftover
                    remove.append(stage)
                    held.enter_context(lock.pop_all())
                else:
                    shutil.rmtree(leftover)
        while stage is None or not stage.exists():  # taken for a leftover before it was locked: once more
            stage = out.parent / f"{prefix}{secrets.token_hex(8)}"
            stage.mkdir()
            remove.append(stage)
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(_locked(stage))
                replace_text(stage / _JOB, job)
        try:
            yield stage
        except KeyboardInterrupt:
            if (stage / STATE).exists():
                remove.remove(stage)
            raise
        (stage / _JOB).unlink()
        sync_directory(stage)
        if replace and out.exists():
            old = out.parent / f"{prefix}{secrets.token_hex(8)}"
            os.rename(out, old)
            remove.append(old)
        try:
            os.rename(stage, out)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(error.errno, error.strerror, str(out)) from None
            raise
        sync_directory(out.parent)


def _job_of(stage: Path) -> str:
    """Return the job of an interrupted build, or "" if it is unknown."""
    try:
        return read_file(stage / _JOB, 1 << 10).decode()
    except (OSError, ValueError):
        return ""


@contextlib.contextmanager
def _locked(directory: Path, flags: int = 0) -> Iterator[None]:
    """Hold the lock of `directory`. Raises OSError with LOCK_NB if another process holds it.

    Without LOCK_NB a file system that cannot lock directories (NFS) is accepted: LOCK_NB fails there as well,
    so no directory is taken for a leftover.
    """
    descriptor = open_directory(directory)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        except OSError:
            if flags:
                raise
        yield
    finally:
        os.close(descriptor)
