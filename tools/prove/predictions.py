"""The least time of every kernel on named GPUs, said before it is measured, from counted bytes and FLOPs.

No kernel is faster than the bytes that it must move over its GPU's memory bandwidth, nor than its FLOPs over
the rate of its tensor cores. Both are counted here, on tensors without data, for the shapes of
`tools/cubins/cases.py`, and divided by the rates of data sheets (`fastmp/plan/hardware.py`). A
measurement below such a floor would refute the count or the measurement. What share of its floor each kernel
is expected to reach was committed before any GPU was at hand, in `benchmarks/results/predicted_*.json` of the
sources; `python -m benchmarks.gpu_check` measures the same rows on a GPU, and `python -m benchmarks.report`
shows both. Where those files are there, their floors are computed again from their bytes and FLOPs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastmp
from fastmp.ops.core.registry import OPS
from fastmp.plan.hardware import GPUS
from tools.cubins.cases import CASES, WIDE
from tools.cubins.compiled import meta
from tools.prove.claims import Claim, Table

NAMED = ("a100", "h100", "h200", "b200")
_ROUNDED = 1e-3  # figures of the committed files have four digits


class Floor(NamedTuple):
    """Bytes and FLOPs of an op in a case, and its roofline time on each GPU."""

    case: str
    op: str
    bytes: int
    flops: int
    microseconds: tuple[float, ...]


def claims() -> Iterator[Claim | Table]:
    """Count, divide, and compare with what is committed."""
    floors = [*counted()]
    without = [each.case for each in floors if not min(each.microseconds) > 0]
    says = "launches of ops, of large models, with a floor by counted bytes and FLOPs"
    yield Claim.all_of(says, len(floors) - len(without), len(floors), without)
    yield from _committed(Path(fastmp.__file__).resolve().parents[1] / "benchmarks" / "results")
    rows = [[each.case, each.op, each.bytes, each.flops, *each.microseconds] for each in floors]
    columns = ("case", "op", "bytes", "FLOPs", *(f"{name}, us" for name in NAMED))
    yield Table("floors in bfloat16, below which no measurement can be", columns, rows, on_page=False)


def counted() -> Iterator[Floor]:
    """Return the roofline of each case in bfloat16."""
    for name, (case, _) in CASES.items():
        op, arguments = case(meta(torch.bfloat16), torch.float32)
        entry = OPS[op]
        moved, flops = entry.traffic(*arguments), entry.flops(*arguments) if entry.flops else 0
        itemsize = 1 if "_fp8" in op else 4 if name in WIDE else 2
        least = []
        for gpu in map(GPUS.__getitem__, NAMED):
            peak = gpu.peak(itemsize) or gpu.half  # a GPU without FP8
            least.append(1e6 * max(moved / gpu.memory_bandwidth, flops / peak))
        yield Floor(name, op, moved, flops, tuple(least))


def _committed(folder: Path) -> Iterator[Claim]:
    files = sorted(folder.glob("predicted_*.json"))
    says = "committed predictions whose floor is that of their bytes and FLOPs, and is not undercut"
    if not files:
        yield Claim.not_shown(says, "benchmarks/results is part of the sources, not of the package")
    for file in files:
        found = json.loads(file.read_text())
        wrong = [*contradictions(found["predicted"], found["rows"])]
        yield Claim.all_of(f"{says}, {file.name}", len(found["rows"]) - len(wrong), len(found["rows"]), wrong)


def contradictions(rates: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the item of each row whose floor, expected time and share of the floor do not fit together."""
    for row in rows:
        multiplied = "float8_e4m3fn" if "_fp8" in row["item"] else "bfloat16"
        flops_per_ms = rates["gemm_tflops"][multiplied] * 1e9
        floor_ms = max(row["bytes"] / (rates["copy_gbs"] * 1e6), row["flops"] / flops_per_ms)
        fits = abs(row["floor_ms"] - floor_ms) <= _ROUNDED * floor_ms
        share = abs(row["of_floor"] - row["floor_ms"] / row["ms"]) <= 2 * _ROUNDED
        if not (fits and share and row["ms"] >= row["floor_ms"]):
            yield row["item"]
