"""Compare the tensors of all ranks with those of the dense module. Pure: tensors in, observations out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fastmp.testing.differential.cases import Case
from fastmp.testing.differential.harness import Key, Run
from fastmp.testing.differential.subject import SUM, Placement, Subject

__all__ = ["Observation", "observe"]


@dataclass
class Observation:
    """A tensor as all ranks hold it, with the expected part of each.

    Attributes:
        key: kind ("output", "gradient", "norm", "weight"), step, microbatch and name.
        values: rank -> its tensor.
        expected: rank -> its part of the dense module's tensor.
        placement: axis -> dimension sharded along it.
        errors: rank -> largest absolute error; NaN where a tensor is not finite, inf for a wrong shape.
        scale: largest value among tensors of the kind.
        tolerance: relative to `scale`.
        data_axes: axes along which ranks have their own data.
    """

    case: Case
    key: Key
    values: dict[int, torch.Tensor]
    expected: dict[int, torch.Tensor]
    placement: Placement
    scale: float
    tolerance: float
    data_axes: Sequence[str] = ()
    errors: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.errors = {rank: _error(value, self.expected[rank]) for rank, value in self.values.items()}

    @property
    def atol(self) -> float:
        """Return the largest error that is due to rounding."""
        return self.tolerance * self.scale

    @property
    def bad(self) -> list[int]:
        """Return the ranks whose tensor differs from the dense module's."""
        return [rank for rank, error in self.errors.items() if not error <= self.atol]

    @property
    def worst(self) -> tuple[int, float]:
        """Return (rank, error) of the largest error; NaN and infinities rank first."""
        return max(self.errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])

    def close(self, a: torch.Tensor, b: torch.Tensor, times: float = 1.0) -> bool:
        """Return True if two tensors are the same up to rounding."""
        return a.shape == b.shape and _error(a, b) <= self.atol * max(times, 1.0) * 4

    def part(self, full: torch.Tensor, rank: int) -> torch.Tensor | None:
        """Return the part of a full tensor for `rank`; None if the shards do not cover the tensor."""
        return part(self.case, full, self.values, self.placement, rank)

    def peers(self, rank: int, axis: str) -> list[int]:
        """Return the ranks that have the tensor and differ from `rank` in their index along `axis` alone."""
        return _peers(self.case, self.values, rank, axis)

    def replicated_axes(self) -> list[str]:
        """Return the axes of more than one rank along which every rank should hold the same tensor."""
        axes = [axis for axis, size in self.case.layout if size > 1 and axis not in self.placement]
        return [
            axis
            for axis in axes
            if all(
                self.expected[rank].shape == self.expected[peer].shape
                and bool((self.expected[rank] == self.expected[peer]).all())
                for rank in self.values
                for peer in self.peers(rank, axis)
            )
        ]


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.shape != expected.shape:
        return math.inf
    return float((value - expected).abs().max()) if value.numel() else 0.0


def _peers(case: Case, ranks: dict[int, torch.Tensor], rank: int, axis: str) -> list[int]:
    own = {**case.coordinates(rank), axis: 0}
    return [other for other in ranks if {**case.coordinates(other), axis: 0} == own]


def part(
    case: Case, full: torch.Tensor, values: dict[int, torch.Tensor], placement: Placement, rank: int
) -> torch.Tensor | None:
    """Return the slice of `full` that `rank` should hold, by the sizes of all shards; None: no fit."""
    for axis, dim in placement.items():
        if dim == SUM or case.axis(axis) == 1:
            continue
        sizes = [values[peer].shape[dim] for peer in _peers(case, values, rank, axis)]
        if sum(sizes) != full.shape[dim]:
            return None
        index = case.coordinates(rank)[axis]
        full = full.narrow(dim, sum(sizes[:index]), sizes[index])
    return full


def observe(subject: Subject, run: Run) -> Iterator[Observation]:
    """Yield an observation of every tensor, in the order in which they were computed.

    Raises:
        ValueError: a rank has a tensor that the dense module has not, or no rank has one of its parameters.
    """
    case, reference = run.case, run.reference
    keys = list(dict.fromkeys(key for record in run.ranks for key in record))
    keys.sort(key=lambda key: (key[1], ("output", "gradient", "norm", "weight").index(key[0])))
    missing = [
        name for kind, step, _, name in reference.values
        if kind == "gradient" and step == 0 and subject.placement(name) is not None
        and not any(("gradient", 0, -1, name) in record for record in run.ranks)
    ]  # fmt: skip
    if missing:
        raise ValueError(
            f"no rank has the dense module's parameter {missing[0]!r}; map it with `dense_name`, or leave it "
            f"out with placements = {{{missing[0]!r}: None}}"
        )
    for key in keys:
        kind, name = key[0], key[3]
        if key not in (reference.outputs if kind == "output" else reference.values):
            raise ValueError(
                f"the dense module has no {kind} named {name!r}; name the dense one with `dense_name`, or "
                f"leave it out with placements = {{{name!r}: None}}"
            )
        held = {rank: record[key] for rank, record in enumerate(run.ranks) if key in record}
        values = {rank: tensor for rank, (tensor, _) in held.items()}
        placement = next(iter(held.values()))[1]
        if SUM in placement.values():
            values = _summed(case, values, placement)
        expected = {}
        for rank, value in values.items():
            full = (
                reference.outputs[key][case.data_index(rank, subject.data_axes)]
                if kind == "output"
                else reference.values[key]
            )
            fitting = part(case, full, values, placement, rank)
            expected[rank] = full if fitting is None else fitting
            if value.numel() == expected[rank].numel() == 1:
                values[rank] = value.reshape(expected[rank].shape)
        scale = _scale(run, kind)
        yield Observation(case, key, values, expected, placement, scale, subject.tolerance, subject.data_axes)


def _summed(case: Case, values: dict[int, torch.Tensor], placement: Placement) -> dict[int, torch.Tensor]:
    """Return the tensors after a sum over the axes that hold partial sums."""
    for axis, dim in placement.items():
        if dim == SUM:
            values = {
                rank: torch.stack([values[peer] for peer in _peers(case, values, rank, axis)]).sum(0)
                for rank in values
            }
    return values


def _scale(run: Run, kind: str) -> float:
    """Return the largest value of the dense module's tensors of a kind, 1e-30 at least."""
    reference = run.reference
    tensors = [each for value in reference.outputs.values() for each in value] if kind == "output" else [
        value for key, value in reference.values.items() if key[0] == kind
    ]  # fmt: skip
    return max([1e-30, *(float(each.abs().max()) for each in tensors if each.numel())])
