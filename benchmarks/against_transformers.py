"""Shared parts of the benchmarks against transformers: options and the result file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.measure import environment


def read_options(description: str) -> argparse.Namespace:
    """The `device`, `rounds` and `out` of a command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5, help="of all rivals in turn")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    return parser.parse_args()


def write_rows(out: Path, device: str, rows: list[dict[str, Any]]) -> None:
    """Write rows with the device and versions that they belong to, transformers' among them, as JSON."""
    import transformers

    result = {**environment(device), "transformers": transformers.__version__, "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")
