"""Shared parts of the benchmarks against transformers: options and the result file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.measure import environment, write_json


def read_options(description: str) -> argparse.Namespace:
    """The `device`, `rounds` and `out` of a command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5, help="of all rivals in turn")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    return parser.parse_args()


def rows_of(out: Path | None) -> list[dict[str, Any]]:
    """Return the rows that a former call has written; none where there is no file."""
    return json.loads(out.read_text())["rows"] if out is not None and out.exists() else []


def write_rows(out: Path, device: str, rows: list[dict[str, Any]]) -> None:
    """Write rows with the device and versions that they belong to, transformers' among them, as JSON."""
    import transformers

    result = {**environment(device), "transformers": transformers.__version__, "rows": rows}
    write_json(out, result)
