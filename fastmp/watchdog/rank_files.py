"""Files in the hang directory: the record, stacks and flight records of each rank, and the hang report."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

from fastmp.config.file_access import read_json, replace_text
from fastmp.watchdog.inspector import flight_records
from fastmp.watchdog.records import FILE_LIMIT

__all__ = ["RankFiles", "file_name"]


def file_name(rank: int) -> str:
    """Return the stem of the files of a rank."""
    return f"rank-{rank:05d}"


class RankFiles:
    """The files of one rank in `directory`, which every rank creates.

    | file | content |
    |---|---|
    | `rank-00002.json` | the record of the rank |
    | `rank-00002.stacks` | stacks of all its threads |
    | `rank-00002.flight.json` | torch's flight records |
    | `report.json` | the hang report, with the records of up to hundreds of ranks |

    Errors of the file system are ignored where a job can do without the file.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self._stacks: Any = None

    def begin(self, content: dict[str, Any]) -> None:
        """Open the file for stacks, and write the first record."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:  # the report of an earlier attempt
            with contextlib.suppress(OSError):
                os.replace(self.directory / "report.json", self.directory / "earlier-report.json")
        stacks = self._path("stacks")
        stacks.unlink(missing_ok=True)
        self._stacks = open(stacks, "x")  # which follows no link
        faulthandler.enable(file=self._stacks)
        self.write_record(content)

    def close(self) -> None:
        """Stop writing stacks; crashes go to stderr again."""
        faulthandler.cancel_dump_traceback_later()
        if sys.__stderr__ is not None:
            faulthandler.enable(file=sys.__stderr__)
        self._stacks.close()

    def remove(self) -> None:
        """Delete the files of this rank; the last rank deletes the directory."""
        with contextlib.suppress(OSError):
            for pattern in (f"{file_name(self.rank)}.*", f".{file_name(self.rank)}.*"):
                for path in self.directory.glob(pattern):
                    path.unlink()
            self.directory.rmdir()

    def write_record(self, content: dict[str, Any]) -> None:
        """Replace the record of this rank."""
        with contextlib.suppress(OSError):
            replace_text(self._path("json"), json.dumps(content))

    def has_record(self, rank: int) -> bool:
        """Return True if there is a record of a rank: ranks that end well delete theirs."""
        return (self.directory / f"{file_name(rank)}.json").exists()

    def arm(self, seconds: float) -> None:
        """Write stacks in `seconds`, unless armed again: even if code holds the interpreter until then."""
        faulthandler.dump_traceback_later(seconds, file=self._stacks)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def write_evidence(self) -> None:
        """Write the stacks of all threads, and the flight records."""
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        with contextlib.suppress(OSError):
            replace_text(self._path("flight.json"), "[" + ",\n".join(flight_records()) + "]")

    def write_report(self, content: dict[str, Any]) -> bool:
        """Write the hang report; return False if another rank has written one."""
        try:
            with open(self.directory / "report.json", "x") as file:
                json.dump(content, file, indent=1)
        except FileExistsError:
            return False
        except OSError:  # the report is printed at least
            pass
        return True

    def read_report(self) -> str | None:
        """Return the text of the hang report; None if there is none."""
        with contextlib.suppress(KeyError, ValueError):
            return str(read_json(self.directory / "report.json", FILE_LIMIT)["text"])
        return None

    def _path(self, kind: str) -> Path:
        return self.directory / f"{file_name(self.rank)}.{kind}"
