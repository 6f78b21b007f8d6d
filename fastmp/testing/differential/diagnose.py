"""Name the likely cause of a wrong tensor. Pure: tests hypotheses on the tensors of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from fastmp.testing.differential.compare import Observation
from fastmp.testing.differential.harness import Run

__all__ = ["CAUSES", "Cause", "diagnose"]

CAUSES = {
    "unwritten memory": "memory of torch.empty is read before it is written",
    "not finite": "a value is infinite or NaN",
    "zero": "the tensor is zero: nothing arrives here",
    "stale value": "the tensor is that of an earlier step",
    "not zeroed": "the value of an earlier step was added",
    "missing all-reduce": "ranks hold partial sums that were never added",
    "missing average": "ranks hold values that were never averaged",
    "wrong group": "the collective or the slice uses another group than the tensor is sharded over",
    "wrong order": "the values are right and in the wrong places",
    "counted n times": "every rank of the group contributes the whole value to a sum",
    "divided by the group size": "the value is averaged where it should be summed",
    "log of the group size": "every rank contributes the full logits to the sum of exponentials",
    "wrong sign": "the sign is reversed",
    "constant factor": "the tensor is a multiple of the right one",
    "local token counts": "parts of the data are divided by their own numbers of tokens",
    "part of the data lost": "some microbatches or parts of the data are not in the gradient",
    "wrong weights of the data": "the parts of the data do not weigh the same",
    "missing from the norm": "gradients, or shards of them, are left out of the norm",
    "counted n times in the norm": "replicated gradients are counted once for every rank",
    "norm of one rank": "the norm is not reduced over the ranks",
    "average of norms": "norms of ranks are averaged; their squares should be added",
    "ranks disagree": "ranks that should hold the same tensor do not: a reduction is missing or wrong",
    "wrong shape": "shards do not make the dense tensor; does `placements` name their dimension?",
    "overwritten memory": "a tensor that an op has saved for its backward pass is written to before it",
    "backward only": "all outputs are right: the backward pass is wrong",
    "wrong value": "no simple relation to the right value was found",
    "crash": "the parallel code raised, died or hung",
}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        name: one of `CAUSES`.
        detail: axis, ratio, or what else was found.
    """

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.detail})' if self.detail else ''}: {CAUSES[self.name]}"


def diagnose(run: Run, wrong: Observation, earlier: list[Observation]) -> Cause:
    """Return the first cause whose hypothesis fits `wrong`; `earlier`: observations before it."""
    tests: list[Callable[[Run, Observation, list[Observation]], Iterator[Cause]]] = [_plain]
    if wrong.key[0] == "norm":
        tests += [_norm]
    tests += [_steps, _sums, _factor, _places, _data, _offset, _repeated, _apart, _last]
    for test in tests:
        for cause in test(run, wrong, earlier):
            return cause
    raise AssertionError("the last test names a cause in any case")


def _plain(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """Not finite, wrong shape, zero."""
    values = {rank: wrong.values[rank] for rank in wrong.bad}
    if any(not value.isfinite().all() for value in values.values()):
        count = sum(int((~value.isfinite()).sum()) for value in values.values())
        if all(bool(value.isfinite().all()) for value in wrong.expected.values()):
            yield Cause("unwritten memory" if run.case.poison else "not finite", f"{count} values")
    if any(value.shape != wrong.expected[rank].shape for rank, value in values.items()):
        rank = wrong.bad[0]
        yield Cause(
            "wrong shape",
            f"rank {rank} has {tuple(values[rank].shape)}, expected {tuple(wrong.expected[rank].shape)}",
        )
    if all(not value.any() for value in values.values()):
        yield Cause("zero")


def _steps(_: Run, wrong: Observation, earlier: list[Observation]) -> Iterator[Cause]:
    """The value of an earlier step, alone or added."""
    kind, microbatch, name = wrong.key[0], wrong.key[2], wrong.key[3]
    for before in earlier:
        if before.key[0] != kind or before.key[3] != name or kind == "weight":
            continue
        if {rank: v.shape for rank, v in before.expected.items()} != {
            rank: v.shape for rank, v in wrong.expected.items()
        }:
            continue
        when = f"step {before.key[1]}" + (f", microbatch {before.key[2]}" if microbatch >= 0 else "")
        if _all(wrong, lambda rank, value, old=before: wrong.close(value, old.expected[rank])):
            yield Cause("stale value", when)
        if _all(
            wrong,
            lambda rank, value, old=before: wrong.close(value - old.expected[rank], wrong.expected[rank]),
        ):
            yield Cause("not zeroed", when)


def _all(wrong: Observation, holds: Callable[..., bool]) -> bool:
    """Return True if a hypothesis holds on every rank with a wrong tensor."""
    return all(holds(rank, wrong.values[rank]) for rank in wrong.bad)


def _sums(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """Sums and means over an axis or several of them, and sums over another one."""
    axes = wrong.replicated_axes()
    for count in range(1, len(axes) + 1):
        for picked in combinations(axes, count):
            sums = {rank: _over(wrong, rank, picked) for rank in wrong.values}
            number = math.prod(run.case.axis(axis) for axis in picked)
            name = ", ".join(picked)
            if not _differ(wrong, picked):
                continue
            if all(wrong.close(sums[rank], wrong.expected[rank], number) for rank in wrong.values):
                yield Cause("missing all-reduce", f"over {name}")
            for other in axes:
                n = run.case.axis(other)
                if other not in picked and n > 1 and all(
                    wrong.close(sums[rank] / n, wrong.expected[rank], number) for rank in wrong.values
                ):  # fmt: skip
                    yield Cause("wrong group", f"summed over {other}, not over {name}")
            if all(wrong.close(sums[rank] / number, wrong.expected[rank]) for rank in wrong.values):
                yield Cause("missing average", f"over {name}")


def _over(wrong: Observation, rank: int, axes: tuple[str, ...]) -> torch.Tensor:
    """Return the sum of a tensor over the ranks along `axes`."""
    fixed = dict.fromkeys(axes, 0)
    own = {**wrong.case.coordinates(rank), **fixed}
    peers = [other for other in wrong.values if {**wrong.case.coordinates(other), **fixed} == own]
    return torch.stack([wrong.values[peer] for peer in peers]).sum(0)


def _differ(wrong: Observation, axes: tuple[str, ...]) -> bool:
    """Return True if ranks along each of `axes` hold different tensors."""
    return all(
        any(
            not wrong.close(wrong.values[rank], wrong.values[peer])
            for rank in wrong.values
            for peer in wrong.peers(rank, axis)
        )
        for axis in axes
    )


def _ratio(wrong: Observation) -> float | None:
    """Return the number that every wrong tensor is a multiple of the right one by."""
    top = sum(float((wrong.values[rank] * wrong.expected[rank]).sum()) for rank in wrong.bad)
    bottom = sum(float(wrong.expected[rank].pow(2).sum()) for rank in wrong.bad)
    if not bottom:
        return None
    ratio = top / bottom
    fits = _all(
        wrong, lambda rank, value: wrong.close(value, wrong.expected[rank] * ratio, max(abs(ratio), 1.0))
    )
    return ratio if fits else None


def _factor(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """A constant factor: the size of an axis, of several, its inverse, the sign, or any other."""
    ratio = _ratio(wrong)
    if ratio is None or wrong.key[0] == "weight":
        return
    axes = [axis for axis, size in run.case.layout if size > 1]
    for count in range(1, len(axes) + 1):
        for picked in combinations(axes, count):
            number = math.prod(run.case.axis(axis) for axis in picked)
            name = ", ".join(picked)
            if math.isclose(ratio, number, rel_tol=1e-6):
                yield Cause("counted n times", f"{number} times, the size of {name}")
            if math.isclose(ratio, 1 / number, rel_tol=1e-6):
                yield Cause("divided by the group size", f"1/{number}, the size of {name}")
    if math.isclose(ratio, -1, rel_tol=1e-6):
        yield Cause("wrong sign")
    if sum(wrong.values[rank].numel() for rank in wrong.bad) > 1:
        yield Cause("constant factor", f"{ratio:.6g}")


def _places(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """Right values in wrong places: of another rank, of another part of the data, permuted."""
    case = run.case
    several = sum(size > 1 for _, size in case.layout) > 1
    # 1. The tensor of another rank, as a whole.
    owners = {
        rank: [
            other for other in wrong.expected
            if wrong.close(wrong.values[rank], wrong.expected[other])
            and not wrong.close(wrong.expected[rank], wrong.expected[other])
        ]
        for rank in wrong.bad
    }  # fmt: skip
    if all(owners.values()):
        rank = wrong.bad[0]
        found = f"rank {rank} has what belongs to rank {owners[rank][0]}"
        yield Cause("wrong group" if several else "wrong order", found)
    # 2. Slices of the right tensors, along one dimension.
    for dim in range(wrong.values[wrong.bad[0]].dim()):
        pool = [piece for value in wrong.expected.values() for piece in value.unbind(dim)]

        def known(rank: int, value: torch.Tensor, pool: list[torch.Tensor] = pool, dim: int = dim) -> bool:
            pieces = value.unbind(dim)
            return len(pieces) > 1 and all(any(wrong.close(piece, one) for one in pool) for piece in pieces)

        if _all(wrong, known):
            yield Cause(
                "wrong group" if several else "wrong order", f"slices of dimension {dim} are in other places"
            )
    # 3. The same numbers in another order.
    if _all(
        wrong,
        lambda rank, value: (
            value.numel() > 2
            and wrong.close(value.flatten().sort().values, wrong.expected[rank].flatten().sort().values)
        ),
    ):
        yield Cause("wrong order", "the elements are permuted")


def _data(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """A gradient that weighs microbatches and parts of the data other than by the tokens of the step."""
    kind, step, name = wrong.key[0], wrong.key[1], wrong.key[3]
    partial = run.reference.partial.get((step, name), {})
    counts = run.reference.counts.get(step, {})
    if kind != "gradient" or len(partial) < 2:
        return
    rank = wrong.bad[0]
    pieces = [wrong.part(piece, rank) for piece in partial.values()]
    if any(piece is None for piece in pieces):
        return
    basis = torch.stack([piece.flatten() for piece in pieces if piece is not None], 1)
    target = wrong.values[rank].flatten()
    if len(target) <= basis.shape[1] or int(torch.linalg.matrix_rank(basis)) < basis.shape[1]:
        return
    weights = torch.linalg.lstsq(basis, target).solution
    if not wrong.close(basis @ weights, target, 100):
        return
    relative = weights * sum(counts.values())
    said = "weights " + ", ".join(f"{value:.4g}" for value in relative.tolist()) + " of 1"
    tiny = relative.abs() < 1e-6
    if tiny.any():
        yield Cause("part of the data lost", said)
    for own in _own_counts(counts):
        scaled = relative * torch.tensor(own, dtype=torch.float64)
        if (scaled / scaled[0] - 1).abs().max() < 1e-6 and (relative / relative[0] - 1).abs().max() > 1e-6:
            yield Cause("local token counts", said)
    yield Cause("wrong weights of the data", said)


def _own_counts(counts: dict[tuple[int, int], float]) -> Iterator[list[float]]:
    """Yield the counts that parts may be divided by: of each part, of each microbatch, of both."""
    for position in (1, 0):
        totals: dict[int, float] = {}
        for key, count in counts.items():
            totals[key[position]] = totals.get(key[position], 0.0) + count
        yield [totals[key[position]] for key in counts]
    yield list(counts.values())


def _norm(run: Run, wrong: Observation, earlier: list[Observation]) -> Iterator[Cause]:
    """A gradient norm: parts counted several times or left out, or the norm of one rank."""
    step = wrong.key[1]
    grads = [seen for seen in earlier if seen.key[0] == "gradient" and seen.key[1] == step]
    full = {
        name: float(value.pow(2).sum())
        for (kind, at, _, name), value in run.reference.values.items()
        if kind == "gradient" and at == step
    }
    right = sum(full.values())

    def is_square(square: float | dict[int, float]) -> bool:
        each = square if isinstance(square, dict) else dict.fromkeys(wrong.bad, square)
        return all(math.isclose(float(wrong.values[r]) ** 2, each[r], rel_tol=1e-7) for r in wrong.bad)

    local = {
        rank: {seen.key[3]: float(seen.values[rank].pow(2).sum()) for seen in grads if rank in seen.values}
        for rank in wrong.values
    }
    # 1. Of one rank, or an average.
    if is_square({rank: sum(local[rank].values()) for rank in local}):
        yield Cause("norm of one rank")
    norms = [math.sqrt(sum(each.values())) for each in local.values()]
    if is_square((sum(norms) / len(norms)) ** 2):
        yield Cause("average of norms")
    # 2. Parameters counted several times.
    whole = [seen.key[3] for seen in grads if not seen.placement]
    sets = [(name,) for name in full] + ([tuple(whole)] if len(whole) > 1 else [])
    for axis, size in run.case.layout:
        for names in sets if size > 1 else []:
            extra = (size - 1) * sum(full[name] for name in names)
            if extra and is_square(right + extra):
                yield Cause(
                    "counted n times in the norm", f"{', '.join(names)}: {size} times, the size of {axis}"
                )
    # 3. Parameters or shards left out.
    for name, square in full.items():
        if square and is_square(right - square):
            yield Cause("missing from the norm", name)
        for rank in wrong.values:
            kept = local[rank].get(name, 0.0)
            if square - kept > 1e-12 * right and is_square(right - square + kept):
                yield Cause("missing from the norm", f"shards of {name} on ranks other than {rank}")


def _offset(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """An output that is off by the logarithm of a group's size, for each token of a summed loss."""
    if wrong.key[0] != "output":
        return
    offsets = torch.cat([(wrong.values[rank] - wrong.expected[rank]).flatten() for rank in wrong.bad])
    for axis, size in run.case.layout:
        if size > 1:
            tokens = offsets / math.log(size)
            if (tokens - tokens.round()).abs().max() < 1e-6 and bool((tokens.round() != 0).all()):
                yield Cause("log of the group size", f"log {size} a token, the size of {axis}")


def _repeated(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """An output with a parameter, such as a bias, added once for every rank of a group."""
    kind, step = wrong.key[0], wrong.key[1]
    weights = {
        name: value
        for (of, at, _, name), value in run.reference.values.items()
        if of == "weight" and at == step - 1
    }
    for axis, size in run.case.layout:
        for name, weight in weights.items() if kind == "output" and size > 1 else ():
            if weight.dim() == 1 and all(
                wrong.values[rank].dim()
                and weight.shape == wrong.values[rank].shape[-1:]
                and wrong.close(wrong.values[rank], wrong.expected[rank] + (size - 1) * weight, size)
                for rank in wrong.bad
            ):
                yield Cause("counted n times", f"{name}: {size} times, the size of {axis}")


def _apart(run: Run, wrong: Observation, _: list[Observation]) -> Iterator[Cause]:
    """An output that is a wrong sum plus something right: a bias, the input of a residual connection."""
    if wrong.key[0] != "output":
        return
    for name, shifts in _added(run, wrong):
        held = {rank: value - shifts[rank] for rank, value in wrong.values.items()}
        expected = {rank: value - shifts[rank] for rank, value in wrong.expected.items()}
        rest = replace(wrong, values=held, expected=expected)
        for test in (_sums, _factor):
            for cause in test(run, rest, []):
                if cause.name != "constant factor":
                    yield Cause(cause.name, f"{cause.detail}, apart from {name}".removeprefix(", "))


def _added(run: Run, wrong: Observation) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """Yield what may have been added to an output: a vector among the weights, an input, one of each."""
    _, step, microbatch, _ = wrong.key
    vectors: dict[str, list[torch.Tensor]] = {
        name: [value] * run.case.world_size
        for (kind, at, _, name), value in run.reference.values.items()
        if kind == "weight" and at == step - 1 and value.dim() == 1
    }
    parts = {
        name: [values[run.case.data_index(rank, wrong.data_axes)] for rank in range(run.case.world_size)]
        for (kind, at, of, name), values in run.reference.inputs.items()
        if (kind, at, of) == ("input", step, microbatch)
    }
    full = {
        rank: run.reference.outputs[wrong.key][run.case.data_index(rank, wrong.data_axes)]
        for rank in wrong.values
    }
    singles = [*vectors.items(), *parts.items()]
    pairs = [(f"{a} and {b}", [x + y for x, y in zip(v, p, strict=True)]) for a, v in vectors.items()
             for b, p in parts.items() if v[0].shape == p[0].shape[-1:]]  # fmt: skip
    for name, added in [*singles, *pairs]:
        if all(
            added[rank].dim() and added[rank].shape[-1:] == full[rank].shape[-1:] for rank in full
        ) and all(added[rank].dim() == 1 or added[rank].shape == full[rank].shape for rank in full):
            shifts = {rank: wrong.part(added[rank].expand_as(full[rank]), rank) for rank in full}
            fitting = {rank: shift for rank, shift in shifts.items() if shift is not None}
            if len(fitting) == len(full):
                yield name, fitting


def _last(run: Run, wrong: Observation, earlier: list[Observation]) -> Iterator[Cause]:
    """Yield the causes of last resort: disagreeing ranks, a wrong backward pass, a wrong value."""
    for axis in wrong.replicated_axes():
        if _differ(wrong, (axis,)):
            yield Cause("ranks disagree", f"along {axis}")
    if wrong.key[0] == "gradient":
        yield Cause("backward only")
    yield Cause("wrong value")
