"""Parallel layout: which rank belongs to which group. Standard library only.

The same ranks form two grids: the dense one (tp, cp, dp, pp) for attention and dense layers, and the
expert one (etp, ep, edp, pp) for mixture-of-experts layers. One `order` string arranges both: the leftmost
axis varies fastest, so its groups are neighbouring ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

AXES = ("tp", "cp", "ep", "dp", "pp")
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
# The name of an axis of the order string in the expert grid.
_TO_EXPERT = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}


@dataclass(frozen=True, init=False)
class RankGrid:
    """Dense and expert grid over ranks 0 .. world_size - 1.

    `tp`, `cp`, `ep`, `dp` and `pp` are the sizes of tensor, context, expert, data and pipeline parallelism;
    `etp` is the tensor parallelism inside an expert (None: the same as tp), `edp` the data parallelism of
    experts. `dp`, where it is None, and `edp` follow from

        world_size = tp * cp * dp * pp = etp * ep * edp * pp

    `order` names the axes, fastest first. All but `ep` arrange the dense grid; all but `cp` arrange the
    expert grid, where tp is read as etp and dp as edp. An axis of size one in both grids may be left out.

    Experts are sharded over the ranks of tp, cp and dp: cp 8 with ep 8 needs 8 ranks, not 64.

    Raises:
        ValueError: the sizes do not multiply to world_size, `order` misses an axis, or the grids put
            different ranks into a pipeline stage.

    Example:
        >>> grid = RankGrid(world_size=8, tp=2, pp=2)
        >>> grid.dp, grid.ranks("tp")
        (2, [[0, 1], [2, 3], [4, 5], [6, 7]])
    """

    world_size: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    order: tuple[str, ...]

    def __init__(
        self,
        *,
        world_size: int,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        dp: int | None = None,
        pp: int = 1,
        etp: int | None = None,
        order: str = "tp-cp-ep-dp-pp",
    ) -> None:
        etp = tp if etp is None else etp
        given = {"world_size": world_size, "tp": tp, "cp": cp, "ep": ep, "pp": pp, "etp": etp}
        for name, size in (given if dp is None else {**given, "dp": dp}).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"RankGrid: {name} must be a positive integer, got {size!r}")
        dp = _left_over(world_size, {"tp": tp, "cp": cp, "pp": pp}, "dp", dp)
        edp = _left_over(world_size, {"etp": etp, "ep": ep, "pp": pp}, "edp", None)
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "etp": etp, "ep": ep, "edp": edp}
        self.__dict__.update(world_size=world_size, **sizes, order=_parse_order(order, sizes))
        self._check_pipelines()

    @property
    def dense_axes(self) -> tuple[str, ...]:
        """Axes of the dense grid, fastest first."""
        return tuple(axis for axis in self.order if axis in DENSE_AXES)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes of the expert grid, fastest first."""
        return tuple(_TO_EXPERT[axis] for axis in self.order if axis in _TO_EXPERT)

    @property
    def etp_varies_first(self) -> bool:
        """True if neighbours in an etp-ep group are ranks of one etp group, not of one ep group."""
        axes = self.expert_axes
        return "etp" not in axes or "ep" not in axes or axes.index("etp") < axes.index("ep")

    def size(self, axis: str) -> int:
        """Return the number of ranks along one axis of either grid."""
        if axis not in DENSE_AXES + EXPERT_AXES:
            raise ValueError(
                f"RankGrid: unknown axis {axis!r}; axes are {', '.join(DENSE_AXES + EXPERT_AXES[:-1])}"
            )
        size: int = getattr(self, axis)
        return size

    def ranks(self, axes: str) -> list[list[int]]:
        """Return the groups along `axes`: every rank is in one list; lists and their members ascend.

        `axes` is one axis or several of the same grid joined by "-", in any order: "tp", "tp-dp", "ep",
        "etp-ep", "edp". "pp" is the same in both grids. "mp" is a model replica of the dense grid, "tp-pp".
        "embedding" is the first and last stage of each pipeline (the two that share the tied embedding),
        one rank without pipelining: the only name whose groups leave ranks out.
        """
        if axes == "embedding":
            return [group if len(group) == 1 else [group[0], group[-1]] for group in self.ranks("pp")]
        return self._groups(*self._wanted(axes))

    def first(self, axes: str) -> list[int]:
        """Return the group of rank 0 along `axes`, the first of `ranks`.

        Example:
            >>> RankGrid(world_size=8, tp=2, pp=2).first("dp")
            [0, 2]
        """
        if axes == "embedding":
            group = self.first("pp")
            return group if len(group) == 1 else [group[0], group[-1]]
        wanted, grid_axes = self._wanted(axes)
        found, stride = [0], 1
        for axis in grid_axes:
            size = self.size(axis)
            if axis in wanted:
                found = [step + offset for step, offset in product(range(0, size * stride, stride), found)]
            stride *= size
        return found

    def _wanted(self, axes: str) -> tuple[set[str], tuple[str, ...]]:
        """Return the axes that `axes` names, and all axes of their grid, fastest first."""
        wanted = _parse_axes("tp-pp" if axes == "mp" else axes)
        return wanted, self.expert_axes if wanted <= set(EXPERT_AXES) else self.dense_axes

    def _groups(self, wanted: set[str], grid_axes: tuple[str, ...]) -> list[list[int]]:
        member_offsets, first_ranks = [0], [0]
        stride = 1
        for axis in grid_axes:  # fastest first: each multiplies what is there, and both lists stay ascending
            size = self.size(axis)
            steps = range(0, size * stride, stride)
            if axis in wanted:
                member_offsets = [step + offset for step, offset in product(steps, member_offsets)]
            else:
                first_ranks = [step + first for step, first in product(steps, first_ranks)]
            stride *= size
        return [[first + offset for offset in member_offsets] for first in first_ranks]

    def _check_pipelines(self) -> None:
        """Raise ValueError unless both grids put every rank in the same pipeline stage."""
        if self.pp == 1:
            return
        grids = (self.dense_axes, self.expert_axes)
        dense, expert = (math.prod(self.size(axis) for axis in axes[: axes.index("pp")]) for axes in grids)
        if dense == expert:
            return
        groups = [_shorten(self._groups({"pp"}, axes)) for axes in grids]
        raise ValueError(
            f"RankGrid: order {'-'.join(self.order)!r} gives the two grids different pipelines: "
            f"{self._formula(self.dense_axes)} has pp groups {groups[0]}, "
            f"{self._formula(self.expert_axes)} has {groups[1]}; move pp to either end"
        )

    def _formula(self, axes: Iterable[str]) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)

    def __str__(self) -> str:
        return (
            f"{self.world_size} ranks = {self._formula(self.dense_axes)} (dense) "
            f"= {self._formula(self.expert_axes)} (experts)"
        )


def _left_over(world_size: int, sizes: dict[str, int], name: str, size: int | None) -> int:
    """Return the size of axis `name`: `size`, or if that is None the quotient of world_size and `sizes`.

    Raises:
        ValueError: the sizes do not multiply to world_size.
    """
    known = math.prod(sizes.values())
    formula = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
    if size is not None:
        if known * size != world_size:
            raise ValueError(
                f"RankGrid: {formula} x {name} {size} = {known * size} is not world_size {world_size}"
            )
        return size
    if world_size % known:
        raise ValueError(f"RankGrid: world_size {world_size} is not a multiple of {formula} = {known}")
    return world_size // known


def _parse_order(order: str, sizes: dict[str, int]) -> tuple[str, ...]:
    tokens = _tokens(order, AXES, f"order {order!r}", " (those of experts follow tp and dp)")
    for axis in AXES:
        for name in dict.fromkeys((axis, _TO_EXPERT.get(axis, axis))):
            if axis not in tokens and sizes[name] > 1:
                raise ValueError(
                    f"RankGrid: order {order!r} leaves out {axis!r}, but {name} is {sizes[name]}"
                )
    return tokens


def _tokens(text: str, known: tuple[str, ...], place: str, hint: str) -> tuple[str, ...]:
    """Split `text` at "-" into axes. Raises ValueError for one that is not `known`, or repeated."""
    tokens = tuple(text.split("-"))
    for token in tokens:
        if token not in known:
            raise ValueError(
                f"RankGrid: unknown axis {token!r} in {place}; axes are {', '.join(known)}{hint}"
            )
        if tokens.count(token) > 1:
            raise ValueError(f"RankGrid: axis {token!r} appears more than once in {place}")
    return tokens


def _parse_axes(axes: str) -> set[str]:
    known = tuple(dict.fromkeys(DENSE_AXES + EXPERT_AXES))
    tokens = _tokens(axes, known, repr(axes), ", or the names mp and embedding")
    wanted = set(tokens)
    if not (wanted <= set(DENSE_AXES) or wanted <= set(EXPERT_AXES)):
        dense, expert = (
            [t for t in tokens if t in names and t != "pp"] for names in (DENSE_AXES, EXPERT_AXES)
        )
        raise ValueError(
            f"RankGrid: {axes!r} mixes the grids: {', '.join(dense)} of the dense grid with "
            f"{', '.join(expert)} of the expert grid"
        )
    return wanted


def _shorten(groups: list[list[int]]) -> str:
    shown = ", ".join(str(group) for group in groups[:4])
    return f"[{shown}, ...]" if len(groups) > 4 else f"[{shown}]"
