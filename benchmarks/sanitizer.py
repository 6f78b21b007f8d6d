"""NVIDIA's compute-sanitizer over a small pass of every kernel: memcheck, racecheck, initcheck.

It runs without torch's caching allocator, so that every tensor is an allocation of its own and a read beyond
one is seen. Triton's kernels come from its cache on disk, if a run before has compiled them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck")
# It reads memory that nothing has written, on purpose, and trusts it with nothing.
_UNWRITTEN = ["--kernel-name-exclude", "kernel_substring=scatter_kernel"]
_FOUND = 86  # exit status of the sanitizer where it found something
_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def find() -> str | None:
    """Return the path of compute-sanitizer, None if it is not installed."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(_PLACES)
    )


def command(tool: str, sanitizer: str = "compute-sanitizer", families: Sequence[str] = ()) -> list[str]:
    watched = [sys.executable, "-m", "benchmarks.correct", "--touch", "--device", "cuda", *families]
    options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "5"]
    exclude = _UNWRITTEN if tool == "initcheck" else []
    return [sanitizer, *options, "--kernel-name", "kernel_substring=kernel", *exclude, *watched]


def start(tool: str, sanitizer: str, root: Path, log: Path, families: Sequence[str] = ()) -> subprocess.Popen:
    """Start one tool over the families, from the root of the repository; it writes into the file `log`."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as out:
        return subprocess.Popen(
            command(tool, sanitizer, families),
            cwd=root,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen) -> None:
    """End a process that has a session of its own, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(tool: str, status: int | None, output: str) -> dict[str, Any]:
    """Return what a tool said: how many errors, and their first lines; a `status` of None is out of time."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines()]
    said = [line for line in lines if line]
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY:\s*(\d+) (?:error|hazard)", output)
    errors = int(summary.group(1)) if summary else None
    row = {"tool": tool, "errors": errors, "ok": status == 0 and errors == 0}
    if status is None:
        return {**row, "raised": "out of time after: " + (said[-1] if said else "nothing")}
    if status not in (0, _FOUND):
        return {**row, "raised": f"exit status {status}: {said[-1] if said else ''}"}
    if not row["ok"]:
        first = next((i for i, line in enumerate(said) if re.match(r"(Invalid|Uninit|Error|Race)", line)), 0)
        row["first"] = said[first : first + 6]
    return row


def run(root: Path, folder: Path, seconds: float, families: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run all tools at once for at most `seconds`; return a row for each, none if it is not installed.

    families: those of `benchmarks.correct`, by default all.
    """
    if (sanitizer := find()) is None:
        return []
    logs = {tool: folder / f"{tool}.log" for tool in TOOLS}
    until = time.monotonic() + seconds
    running = {tool: start(tool, sanitizer, root, log, families) for tool, log in logs.items()}
    rows = []
    for tool, process in running.items():
        try:
            status = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            status = None
        rows.append(verdict(tool, status, logs[tool].read_text(errors="replace")))
    return rows
