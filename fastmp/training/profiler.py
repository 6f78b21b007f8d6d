"""Profiling some steps of a run: `fastmp train --profile torch|nsys|ncu --profile-steps 10:13`.

Steps are counted as in a slice: 10:13 are the three steps after the tenth. `torch` writes a trace for
chrome://tracing or https://ui.perfetto.dev into the run's directory. For `nsys` and `ncu` the first rank runs
itself once more under the tool, whose capture starts and stops around those steps (cudaProfilerStart and
Stop), with the ranges of `fastmp.profiling` as NVTX ranges. Other ranks and other steps run as ever.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastmp.config import Recipe
from fastmp.config.console import to_stdout
from fastmp.profiling import enable_nvtx

if TYPE_CHECKING:
    from fastmp.training.metrics import TrainLog

__all__ = ["StepProfiler", "nsight_command", "run_under_nsight"]

NSIGHT = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
_TRACE = "profile-{0}-{1}.json"


class StepProfiler:
    """Profile some steps; call it with the number of steps done, before each step and after the last.

    Profiles from `first` on until `last` steps are done, or until `close`; a run that starts in between is
    profiled from there. `kind` is "torch", or "nsys" or "ncu" within a process under that tool. `log` is told
    where the profile is and what the ranges took.
    """

    def __init__(self, kind: str, steps: tuple[int, int], directory: Path, log: TrainLog) -> None:
        self.kind, self.steps, self.directory, self.log = kind, steps, directory, log
        self._running: Any = None
        if kind in NSIGHT:
            enable_nvtx()

    def __call__(self, done: int) -> None:
        first, last = self.steps
        if self._running is None and first <= done < last:
            self._start()
        elif self._running is not None and done >= last:
            self.close()

    def _start(self) -> None:
        if self.kind in NSIGHT:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            self._running = True
        else:
            self._running = torch.profiler.profile()  # on the devices there are
            self._running.start()

    def close(self) -> None:
        """End the profile, if there is one; further calls do nothing."""
        running, self._running = self._running, None
        if running is None:
            return
        if self.kind in NSIGHT:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        running.stop()
        path = self.directory / _TRACE.format(*self.steps)
        with self.log.paused():
            running.export_chrome_trace(str(path))
            lines = ranges(running)
        self.log.note(f"profile of steps {self.steps[0]}:{self.steps[1]}: {path}")
        for line in lines:
            self.log.note(line)


def ranges(profile: torch.profiler.profile) -> list[str]:
    """Return a line for each range of fastmp, longest first: calls, ms on the host and, on a GPU, ms there.

    A range on a GPU lasts from the start of its first kernel to the end of its last one.
    """
    calls: Counter[str] = Counter()
    host: Counter[str] = Counter()  # microseconds
    gpu: Counter[str] = Counter()
    for row in profile.key_averages():
        if not row.key.startswith("fastmp."):
            continue
        if row.device_type == torch.autograd.DeviceType.CPU:
            calls[row.key] += row.count
            host[row.key] += row.cpu_time_total
        else:
            gpu[row.key] += row.device_time_total
    width = max(map(len, calls), default=0)
    return [
        f"  {name:<{width}} {calls[name]:5d} x {host[name] / 1e3:10.3f} ms"
        + (f" {gpu[name] / 1e3:10.3f} ms on the GPU" if gpu else "")
        for name in sorted(calls, key=lambda name: (-gpu[name], -host[name]))
    ]


def nsight_command(tool: str, arguments: Sequence[str], recipe: Recipe) -> list[str]:
    """Return the command that runs `fastmp train` with `arguments` under nsys or ncu."""
    first, last = recipe.train.profile_steps
    out = str(Path(recipe.train.run_dir) / f"{recipe.train.name}-profile-{first}-{last}")
    nsys = "profile --capture-range=cudaProfilerApi --capture-range-end=stop --trace=cuda,nvtx,osrt"
    if recipe.graphs.enabled:
        nsys += " --cuda-graph-trace=node"  # else a replay is one bar without kernels
    ncu = "--profile-from-start=off --nvtx --set=full --target-processes=application-only"
    options = {
        "nsys": [*nsys.split(), "--force-overwrite=true", f"--output={out}"],
        "ncu": [*ncu.split(), "--force-overwrite", f"--export={out}"],
    }
    program = [sys.executable, "-m", "fastmp", "train", *arguments]
    return ["env", "FASTMP_PROFILED=1", tool, *options[tool], *program]


def run_under_nsight(arguments: Sequence[str], recipe: Recipe) -> None:
    """Print the command and exec it. Raises ValueError if the tool or a GPU is missing."""
    tool = recipe.train.profile
    command = nsight_command(tool, arguments, recipe)
    to_stdout(shlex.join(command))
    if shutil.which(tool) is None:
        raise ValueError(
            f"{tool} is not on the PATH; install {NSIGHT[tool]} on this machine, or use --profile torch"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"{tool} needs a GPU, and there is none; --profile torch does without")
    Path(recipe.train.run_dir).mkdir(parents=True, exist_ok=True)
    os.execvp(command[0], command)
