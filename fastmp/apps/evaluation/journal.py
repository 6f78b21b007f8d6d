"""Journal of an evaluation: finished batches as JSON lines, from which an interrupted evaluation resumes.

The first line says which evaluation it is; every other one has the scores of a batch. Numbers are written so
that the same bits are read. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from fastmp.config.file_access import FOREIGN_ERRORS, open_writable, read_file

__all__ = ["Journal"]

FORMAT = "fastmp-evaluation-1"
_LIMIT = 1 << 34  # bytes

Values = list[tuple[float, bool]]  # of each row of a batch: log-probability, whether it is the likeliest


class Journal:
    """Journal at `path` of the evaluation described by `identity`, with its `finished` batches.

    It is made where there is none. A last line that is cut short, as by a kill, is cut off. ValueError for a
    file of another evaluation, one that another process writes, or one that is damaged or cannot be read or
    written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self.finished = path, dict[int, Values]()
        header = json.dumps({"format": FORMAT, **identity})
        try:
            lines = read_file(path, _LIMIT).split(b"\n") if path.exists() else [b""]
            self._file = open_writable(path, "ab")
        except OSError as error:
            raise ValueError(f"{path}: cannot be written ({error.strerror})") from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another evaluation writes it now: name another --out") from None
        except OSError:  # a file system without locks
            pass
        if len(lines) > 1 or not header.encode().startswith(lines[0]):
            self._compare(lines[0], header)
            for number, line in enumerate(lines[1:-1], 2):
                batch, values = self._read(number, line)
                self.finished[batch] = values
        whole = sum(len(line) + 1 for line in lines[:-1])
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write(header)

    def add(self, batch: int, values: Sequence[tuple[float, bool]]) -> None:
        """Write the scores of a batch; they are with the system when this returns."""
        self._write(json.dumps([batch, *values]))

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Close and delete the file."""
        self.close()
        os.unlink(self.path)

    def _write(self, line: str) -> None:
        self._file.write(f"{line}\n".encode())
        self._file.flush()

    def _compare(self, line: bytes, header: str) -> None:
        try:
            theirs = json.loads(line)
            is_one = theirs["format"] == FORMAT
        except FOREIGN_ERRORS:
            is_one = False
        if not is_one:
            raise ValueError(f"{self.path}: is no part of an evaluation; name another --out")
        ours = json.loads(header)
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                raise ValueError(
                    f"{self.path}: is part of another evaluation, with {key} {theirs.get(key)!r}, not "
                    f"{ours.get(key)!r}: name another --out, or delete it to begin anew"
                )

    def _read(self, number: int, line: bytes) -> tuple[int, Values]:
        try:
            batch, *values = json.loads(line)
            good = type(batch) is int and batch not in self.finished
            good = good and all(type(a) is float and isfinite(a) and type(b) is bool for a, b in values)
        except FOREIGN_ERRORS:
            good = False
        if not good:
            raise ValueError(f"{self.path}: line {number} is damaged: delete the file to begin anew")
        return batch, [(a, b) for a, b in values]
