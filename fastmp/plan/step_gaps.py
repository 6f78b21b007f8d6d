"""Compare a measured step with an estimated one, by phase and by consumer. Standard library only.

The measured step is a trace of torch.profiler (Chrome JSON), or the JSON of
`nsys stats --report cuda_gpu_trace --format json`; the estimate is what `fastmp plan time --trace` writes.
Both become seconds of a step by (phase, consumer):

- On a GPU, kernels count by their name. Communication counts where no compute kernel runs at the same time.
- On a CPU, every operator counts with the time that it spends outside of others, and takes the consumer of
  the operator around it if its own name tells nothing.
- What is covered by nothing is idle time.

A phase is that of the host's range `fastmp.training.<phase>` in which the work was launched.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from fastmp.config.file_access import read_json_value
from fastmp.plan.layer_time import FORWARD, INPUT, REPEATED, WEIGHT
from fastmp.plan.step_time import IDLE as PIPELINE_IDLE
from fastmp.plan.step_time import ONCE

BACKWARD, IDLE, HOST, COMMUNICATION = "backward", "idle", "host", "communication"
CATEGORY = "estimate"  # of the slices of an estimated step
_MAX_BYTES = 1 << 31
_LARGEST = 1e19  # of times, in microseconds or nanoseconds
_SHORTEST = 1e-12  # seconds of a step
_PHASES = {"forward": FORWARD, "backward": BACKWARD}  # of ranges; others are work done once a step
_ESTIMATED = dict.fromkeys((REPEATED, INPUT, WEIGHT), BACKWARD)
_ONCE = {"optimizer": "optimizer", "reduce": "gradients", "clip": "optimizer", "data": "data"}
_CONSUMERS = (  # the first pattern that is found in a name
    (COMMUNICATION, r"nccl|gloo:|c10d::|fastmp\.collective\.|exchange_(push|pull|give|take|barrier|counts)"),
    ("attention", r"flash|fmha|attention|softmax|sdpa"),
    ("quantisers", r"quanti[sz]e"),
    ("GEMMs", r"gemm|cutlass|nvjet|xmma|grouped_m|aten::(b|add|badd)?b?mm|aten::(linear|matmul)"),
    ("GEMMs", r"fastmp::(linear|add_weight|wgrad)|mkldnn"),
)
_PATTERNS = tuple((consumer, re.compile(pattern, re.IGNORECASE)) for consumer, pattern in _CONSUMERS)
_GROUP = re.compile(r"fastmp:([\w-]+)")  # in the description of a process group
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Table = dict[tuple[str, str], float]  # seconds of a step by (phase, consumer)


@dataclass(frozen=True)
class StepTable:
    """Seconds of a step by (phase, consumer); they add up to `seconds`."""

    seconds: float
    parts: Table


@dataclass(frozen=True)
class Gap:
    """A part of a step, estimated and measured, in seconds."""

    phase: str
    what: str
    estimated: float
    measured: float

    @property
    def gap(self) -> float:
        """Seconds that the measured step takes longer here."""
        return self.measured - self.estimated


def read_trace(path: Path) -> Any:
    """Return the JSON of a trace. Raises ValueError naming the file."""
    return read_json_value(path, _MAX_BYTES, if_larger="profile fewer steps")


def estimated_step(content: Any) -> StepTable:
    """Reduce a trace of `fastmp plan time --trace`: the pipeline rank that works longest.

    Raises:
        ValueError: another trace.
    """
    events = content.get("traceEvents") if isinstance(content, dict) else None
    own = content.get("otherData", {}).get("fastmp") if isinstance(content, dict) else None
    if own is None or not isinstance(events, list):
        raise ValueError("the estimate is no trace of `fastmp plan time --trace`")
    parts: Table = defaultdict(float)
    for event in events:
        if event.get("cat") == CATEGORY and event["pid"] == own["slowest"]:
            args = event["args"]
            what, phase = args["what"], args["phase"]
            if not (isinstance(what, str) and isinstance(phase, str)):
                raise ValueError(f"expected names of a phase and its work, got {short([phase, what])}")
            what = f"{COMMUNICATION}, {what}" if args.get("group") else what
            what = IDLE if what == PIPELINE_IDLE else what
            parts[_ESTIMATED.get(phase, phase), what] += _duration(event) / 1e6
    return _with_idle(parts, _number(own, "seconds"))


def measured_step(content: Any) -> StepTable:
    """Reduce a trace of torch.profiler, or kernels of nsys, to the mean step of its process.

    Raises:
        ValueError: neither of them, or a trace without a step.
    """
    if isinstance(content, list):
        return _kernels_of_nsys(content)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError(
            "the measured trace is neither of torch.profiler (traceEvents) nor a list of kernels, as of "
            "nsys stats --report cuda_gpu_trace --format json"
        )
    slices = [event for event in events if event.get("ph") == "X" and "dur" in event]
    ranges = _Ranges(slices)
    on_gpu = any(event.get("cat") in _KERNELS for event in slices)
    parts = _on_gpu(slices, ranges) if on_gpu else _on_cpu(slices, ranges)
    return _with_idle({key: took / ranges.steps / 1e6 for key, took in parts.items()}, ranges.step / 1e6)


def gaps(estimated: StepTable, measured: StepTable) -> list[Gap]:
    """Align two steps and return their parts, those with the largest gap first.

    If a measured collective does not tell its process group, all communication is one part.
    """
    joined = any(what == COMMUNICATION for _, what in measured.parts)
    phases = any(phase != ONCE for phase, _ in measured.parts)

    def keyed(table: StepTable) -> Table:
        found: Table = defaultdict(float)
        for (phase, what), took in table.parts.items():
            if joined and what.startswith(COMMUNICATION):
                what = COMMUNICATION
            found[phase if phases else ONCE, what] += took
        return found

    ours, theirs = keyed(estimated), keyed(measured)
    rows = [
        Gap(phase, what, ours.get((phase, what), 0.0), theirs.get((phase, what), 0.0))
        for phase, what in ours.keys() | theirs.keys()
    ]
    return sorted(rows, key=lambda row: (-abs(row.gap), row.phase, row.what))


def _with_idle(parts: Mapping[tuple[str, str], float], seconds: float) -> StepTable:
    if seconds < _SHORTEST:
        raise ValueError(f"its step takes {seconds:g} s; expected a positive time")
    idle = seconds - sum(parts.values())
    found = dict(parts)
    if idle > 1e-9 * seconds:
        found[ONCE, IDLE] = found.get((ONCE, IDLE), 0.0) + idle
    return StepTable(seconds, found)


def _number(event: Mapping[str, Any], key: str) -> float:
    """Return a number of an event. Raises ValueError unless it is finite."""
    try:
        value = float(event[key])
    except (ValueError, TypeError, OverflowError):
        value = math.nan
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{key!r} must be a number of at most {_LARGEST:g}, got {short(event[key])}")
    return value


def _duration(event: Mapping[str, Any], key: str = "dur") -> float:
    if (value := _number(event, key)) < 0:
        raise ValueError(f"{key!r} must not be negative, got {value:g}")
    return value


def consumer(name: str, args: Mapping[str, Any] = {}) -> str | None:
    """Return the consumer of a kernel or operator by its name; None if the name tells nothing.

    A collective is followed by its process group, if the trace has its description.
    """
    for found, pattern in _PATTERNS:
        if pattern.search(name):
            group = _GROUP.search(str(args.get("Process Group Description", "")))
            return f"{found}, {group.group(1)}" if found == COMMUNICATION and group else found
    return None


class _Ranges:
    """The phases of training in a trace: ranges of the host's main thread."""

    def __init__(self, slices: Iterable[Mapping[str, Any]]) -> None:
        prefix, found, own = "fastmp.training.", list[tuple[float, float, str]](), Counter[str]()
        threads: Counter[tuple[Any, Any]] = Counter()
        for event in slices:
            name = str(event.get("name"))
            if event.get("cat") == "user_annotation" and name.startswith(prefix):
                start = _number(event, "ts")
                found.append((start, start + _duration(event), name.removeprefix(prefix)))
                own[name.removeprefix(prefix)] += 1
                threads[event.get("pid"), event.get("tid")] += 1
        if not own["optimizer"]:
            raise ValueError(
                "the measured trace has no range fastmp.training.optimizer, so its steps cannot be counted; "
                "profile with `fastmp train --profile torch --profile-steps 10:13`"
            )
        if len({process for process, _ in threads}) > 1:
            raise ValueError("the measured trace has several processes; pass that of one rank")
        found.sort()
        self.thread = threads.most_common(1)[0][0]
        self.steps = own["optimizer"]
        self._starts = [start for start, _, _ in found]
        self._found = found
        self.start, self.end = found[0][0], max(end for _, end, _ in found)
        self.step = (self.end - self.start) / self.steps  # microseconds, mean

    def phase(self, time: float) -> tuple[str, str | None]:
        """Return the phase of a moment, and the consumer of work that is done once a step."""
        number = bisect_right(self._starts, time) - 1
        if number < 0 or time > self._found[number][1]:
            return ONCE, None
        name = self._found[number][2]
        return _PHASES.get(name, ONCE), _ONCE.get(name)


def _on_gpu(slices: Sequence[Mapping[str, Any]], ranges: _Ranges) -> Table:
    """Return the microseconds of kernels; together they are the busy time of the GPU."""
    launched = {
        event["args"]["correlation"]: _number(event, "ts")
        for event in slices
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    parts: Table = defaultdict(float)
    kernels: list[tuple[float, float, str, tuple[str, str | None]]] = []
    for event in slices:
        if event.get("cat") in _KERNELS:
            start, args = _number(event, "ts"), event.get("args", {})
            at = launched.get(args.get("correlation"), start)
            if ranges.start <= at <= ranges.end:
                what = consumer(str(event["name"]), args) or "other kernels"
                kernels.append((start, start + _duration(event), what, ranges.phase(at)))
    kernels.sort(key=lambda kernel: kernel[:3])
    for (_, _, what, (phase, once)), took in zip(kernels, _apart([each[:3] for each in kernels])):
        sent = what.startswith(COMMUNICATION) and once != "gradients"
        parts[phase, what if sent else once or what] += took
    return parts


def _apart(kernels: Sequence[tuple[float, float, str]]) -> list[float]:
    """Return the busy time that each kernel adds; kernels are (start, end, consumer), in order.

    Communication adds what no compute covers. Of kernels of one kind that run at once, the first counts.
    """
    computes = [not what.startswith(COMMUNICATION) for _, _, what in kernels]
    compute = _Union(kernel[:2] for kernel, own in zip(kernels, computes) if own)
    reached, found = {True: 0.0, False: 0.0}, []
    for (start, end, _), own in zip(kernels, computes):
        start = min(max(start, reached[own]), end)
        reached[own] = max(reached[own], end)
        found.append(end - start - (0.0 if own else compute.overlap(start, end)))
    return found


def _on_cpu(slices: Sequence[Mapping[str, Any]], ranges: _Ranges) -> Table:
    """Return microseconds of the main thread's operators, each without those inside it."""
    own = [
        event
        for event in slices
        if (event.get("pid"), event.get("tid")) == ranges.thread
        and event.get("cat") in ("cpu_op", "user_annotation")
        and ranges.start <= _number(event, "ts") <= ranges.end
    ]
    own.sort(key=lambda event: (_number(event, "ts"), -_duration(event)))
    parts: Table = defaultdict(float)
    open_: list[tuple[float, tuple[str, str], list[float]]] = []  # (end, key, [time inside it])

    def close(until: float) -> None:
        while open_ and open_[-1][0] <= until:
            _, key, left = open_.pop()
            parts[key] += left[0]

    for event in own:
        start, took, name = _number(event, "ts"), _duration(event), str(event["name"])
        close(start)
        phase, once = ranges.phase(start)
        what = consumer(name, event.get("args", {}))
        if once is not None:
            what = once
        elif what is None and open_ and open_[-1][1][1] not in (HOST, "other kernels"):
            what = open_[-1][1][1]  # of the operator around it
        elif what is None:
            what = "other kernels" if event["cat"] == "cpu_op" or ".segment." not in name else HOST
            what = HOST if name.startswith("fastmp.training.") else what
        if open_:
            took_inside = min(took, open_[-1][0] - start)
            open_[-1][2][0] -= took_inside
            took = took_inside
        open_.append((start + took, (phase, what), [took]))
    close(float("inf"))
    return parts


class _Union:
    """The union of intervals, for the length of what another one has in common with it."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._starts, self._ends, self._before = list[float](), list[float](), [0.0]
        for start, end in sorted(intervals):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        for start, end in zip(self._starts, self._ends):
            self._before.append(self._before[-1] + end - start)

    def _until(self, time: float) -> float:
        number = bisect_right(self._starts, time)
        if not number:
            return 0.0
        return self._before[number - 1] + min(time, self._ends[number - 1]) - self._starts[number - 1]

    def overlap(self, start: float, end: float) -> float:
        """Return the length that an interval has in common with the union."""
        return self._until(end) - self._until(start)


def _kernels_of_nsys(rows: Sequence[Any]) -> StepTable:
    """Return the kernels of `nsys stats --report cuda_gpu_trace`, which have no phases.

    Of several GPUs, as in a report of all ranks of a server, it is the first by name. A step ends with the
    kernels of the optimizer, between which parameters are gathered: the next one begins with attention, or
    with GEMMs where no kernel is named for attention.
    """
    kernels = list(_nsys_rows(rows))
    works = [
        consumer(name) or ("optimizer" if "adamw" in name else "other kernels") for _, _, name in kernels
    ]
    of_layers, steps, updating = "attention" if "attention" in works else "GEMMs", 0, False
    for what in works:
        steps += what == "optimizer" and not updating
        updating = what == "optimizer" or (updating and what != of_layers)
    if not steps:
        raise ValueError("the measured kernels have none of AdamW, so their steps cannot be counted")
    parts: Table = defaultdict(float)
    spans = [(start, end, what) for (start, end, _), what in zip(kernels, works)]
    for what, took in zip(works, _apart(spans)):
        parts[ONCE, what] += took / steps
    return _with_idle(parts, (max(end for _, end, _ in kernels) - kernels[0][0]) / steps)


def _nsys_rows(rows: Sequence[Any]) -> Iterator[tuple[float, float, str]]:
    """Yield (start, end, name) of the first GPU's kernels in seconds, in their order."""
    found, devices = [], sorted({str(row.get("Device", "")) for row in rows if isinstance(row, dict)})
    for row in rows:
        if isinstance(row, dict) and str(row.get("Device", "")) != devices[0]:
            continue
        if not isinstance(row, dict) or not {"Start (ns)", "Duration (ns)", "Name"} <= row.keys():
            raise ValueError('the measured list has rows without "Start (ns)", "Duration (ns)" and "Name"')
        start = _number(row, "Start (ns)") / 1e9
        found.append((start, start + _duration(row, "Duration (ns)") / 1e9, str(row["Name"])))
    yield from sorted(found)
