"""Twelve ways to divide a model over two, four and eight ranks train as one rank does, to 1e-10 in float64.

Small GPTs in the forms of GPT-2 and Llama, and with experts in that of Qwen3-MoE (shared expert, balancing
losses), make a training step: forward and backward of several microbatches, a step of AdamW, and an
evaluation with the new weights. One rank does it with the whole model, by plain autograd and torch's own
AdamW. Then processes joined by gloo divide it. Every loss, every gradient and its norm, every updated
parameter and the loads of the experts are compared, as |found - expected| / (1 + |expected|); ranks that
hold a part compare their part. `tests/nn/test_layouts.py` does so for some hundred more, chosen such that
every value of an option meets every value of every other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastmp.config import GPTConfig
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from tools.prove.claims import Claim, Table
from tools.prove.parity import CLOSE, GPT2, LLAMA, MIXTRAL, SOME_DENSE, differences, run_whole

TIMEOUT = 240.0  # seconds, for all layouts of so many ranks


@dataclass(frozen=True)
class Layout:
    """A model, how many ranks divide it along which axes, and how a step is run."""

    name: str
    config: GPTConfig
    ranks: int
    axes: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> RankGrid:
        return RankGrid(world_size=self.ranks, **self.axes)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `differences` without groups."""
        return {"config": self.config, "vpp": 1, "number": 2, **self.run}


_SEQUENCE, _RECOMPUTE = {"sequence_parallel": True}, {"recompute": True}
_CHUNKS, _ZERO_BUBBLE = {"vpp": 2, "number": 4}, {"schedule": "zero_bubble", "number": 4}
LAYOUTS = (
    Layout("tensor and sequence parallel", GPT2, 2, {"tp": 2}, _SEQUENCE),
    Layout("context parallel", LLAMA, 2, {"cp": 2}),
    Layout("pipeline, tied embeddings", GPT2, 2, {"pp": 2}, {"number": 4}),
    Layout("pipeline, two chunks a rank", LLAMA, 2, {"pp": 2}, _CHUNKS),
    Layout("pipeline, split backwards (zero bubble)", LLAMA, 2, {"pp": 2}, _ZERO_BUBBLE),
    Layout("experts over ranks", MIXTRAL, 2, {"ep": 2}),
    Layout("data parallel, optimizer divided over ranks", LLAMA, 4, {}, {"shard": True}),
    Layout("tensor and sequence parallel, recomputed", GPT2, 4, {"tp": 4}, _SEQUENCE | _RECOMPUTE),
    Layout("experts divided and over ranks", MIXTRAL, 4, {"tp": 2, "ep": 2, "etp": 2}),
    Layout(
        "tensor, context and expert parallel, some layers dense, recomputed",
        *(SOME_DENSE, 4, {"tp": 2, "cp": 2, "ep": 4, "etp": 1}, _SEQUENCE | _RECOMPUTE),
    ),
    Layout(
        "pipeline of chunks, zero bubble, tensor and expert parallel",
        *(SOME_DENSE, 4, {"pp": 2, "tp": 2, "ep": 2, "etp": 1}, _CHUNKS | _ZERO_BUBBLE),
    ),
    Layout(
        "all of them at once",
        *(MIXTRAL, 8, {"pp": 2, "tp": 2, "cp": 2, "ep": 4, "etp": 1}),
        _SEQUENCE | _RECOMPUTE | _CHUNKS | _ZERO_BUBBLE,
    ),
)


def claims() -> Iterator[Claim | Table]:
    """Return one claim for each parallel layout."""
    rows, kinds = [], dict[str, None]()
    for ranks in sorted({layout.ranks for layout in LAYOUTS}):
        own = [layout for layout in LAYOUTS if layout.ranks == ranks]
        for layout, found in zip(own, compared(own, ranks)):
            yield Claim.at_most(f"{layout.name}, {ranks} ranks", max(found.values()), CLOSE)
            kinds |= dict.fromkeys(found)
            rows.append((layout, found))
    columns = ("layout", "ranks", "axes", *kinds)
    yield Table(
        "The largest difference of each kind to one rank",
        columns,
        [
            [layout.name, layout.ranks, _axes(layout), *(found.get(kind, "") for kind in kinds)]
            for layout, found in rows
        ],
    )


def compared(layouts: Sequence[Layout], ranks: int) -> list[dict[str, float]]:
    """Return the largest difference of each kind on any rank, for each layout of `ranks` ranks."""
    for layout in layouts:  # here, so that no rank has to
        run_whole(layout.config, layout.arguments["number"])
    found = run_ranks(_on_a_rank, ranks, layouts, timeout=TIMEOUT)
    merged = []
    for by_rank in zip(*found):
        kinds = {kind: None for each in by_rank for kind in each}
        merged.append({kind: max(each.get(kind, 0.0) for each in by_rank) for kind in kinds})
    return merged


def _on_a_rank(rank: int, world: int, layouts: Sequence[Layout]) -> list[dict[str, float]]:
    found = []
    for layout in layouts:
        groups = ParallelGroups.create(layout.grid)
        found.append(differences(groups=groups, **layout.arguments))
    return found


def _axes(layout: Layout) -> str:
    named = {axis: getattr(layout.grid, axis) for axis in ("tp", "cp", "pp", "dp", "ep", "etp")}
    if layout.config.moe is None:
        del named["ep"], named["etp"]
    return " ".join(f"{axis} {size}" for axis, size in named.items() if size > 1)
