"""Cases of a differential test: layout, sizes and features, drawn from a seed and shrunk by delta debugging.

Standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

__all__ = ["Case", "FEATURES", "draw_cases", "shrink", "simpler"]

# Features, in the order in which shrinking takes them away: the number is the plain value.
FEATURES = {
    "poison": False, "clip": False, "accumulation": 1, "steps": 1,
    "ignored": False, "empty_experts": False, "uneven": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run of a dense and a parallel module on the same data.

    Attributes:
        layout: (mesh axis, size) pairs, outermost first; their product is the number of ranks.
        sizes: (name, value) pairs, as the subject's `sizes` names them.
        seed: of weights and inputs.
        steps: optimizer steps.
        accumulation: microbatches of a step.
        uneven: data-parallel ranks and microbatches have different numbers of tokens.
        empty_experts: the router sends no token to some experts.
        ignored: some targets are ignored (-100).
        clip: gradients are clipped by their global norm.
        poison: memory from `torch.empty` holds NaN instead of what was there.
    """

    layout: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[str, int], ...] = ()
    seed: int = 0
    steps: int = 1
    accumulation: int = 1
    uneven: bool = False
    empty_experts: bool = False
    ignored: bool = False
    clip: bool = False
    poison: bool = False

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(size for _, size in self.layout)

    def axes(self) -> tuple[str, ...]:
        """Return the names of the mesh axes."""
        return tuple(axis for axis, _ in self.layout)

    def axis(self, name: str) -> int:
        """Return the size of a mesh axis; 1 if the layout does not have it."""
        return dict(self.layout).get(name, 1)

    def __getitem__(self, name: str) -> int:
        """Return a size by its name. Raises KeyError for a name that `sizes` of the subject lacks."""
        return dict(self.sizes)[name]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis; the last axis varies fastest."""
        index = {}
        for axis, size in reversed(self.layout):
            rank, index[axis] = divmod(rank, size)
        return index

    def data_index(self, rank: int, axes: Sequence[str]) -> int:
        """Return which part of the data `rank` has, over the data-parallel `axes`."""
        index, found = self.coordinates(rank), 0
        for axis, size in self.layout:
            if axis in axes:
                found = found * size + index[axis]
        return found

    def num_parts(self, axes: Sequence[str]) -> int:
        """Return the number of different parts of the data."""
        return math.prod(size for axis, size in self.layout if axis in axes)

    def __str__(self) -> str:
        words = [f"{axis}={size}" for axis, size in self.layout]
        words += [f"{name}={value}" for name, value in self.sizes]
        for name, plain in FEATURES.items():
            value = getattr(self, name)
            if value != plain:
                words.append(name if value is True else f"{name}={value}")
        return " ".join([*words, f"seed={self.seed}"])

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary of JSON values."""
        return {**asdict(self), "layout": dict(self.layout), "sizes": dict(self.sizes)}

    @classmethod
    def parse(cls, text: str, axes: Sequence[str], sizes: Sequence[str]) -> Case:
        """Return the case that `str` of it is `text`. Raises ValueError for a word that is none of its
        fields."""
        layout, given = [], []
        rest: dict[str, Any] = {}
        kinds = {field.name for field in fields(cls)} - {"layout", "sizes"}
        for word in text.replace(",", " ").split():
            name, _, value = word.partition("=")
            if name in axes or name in sizes or name in ("seed", "steps", "accumulation"):
                if not value.isdigit():
                    raise ValueError(f"case: expected {name}=NUMBER, got {word!r}")
            elif name not in kinds or value:
                known = sorted({*axes, *sizes, *kinds})
                raise ValueError(f"case: {word!r} is none of {', '.join(known)}")
            if name in axes:
                layout.append((name, int(value)))
            elif name in sizes:
                given.append((name, int(value)))
            else:
                rest[name] = int(value) if value else True
        missing = [name for name in [*axes, *sizes] if name not in dict([*layout, *given])]
        if missing:
            raise ValueError(f"case: {', '.join(missing)} missing; write, for example, {missing[0]}=2")
        return cls(tuple(layout), tuple(given), **rest)


def draw_cases(
    axes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, Sequence[int]],
    number: int,
    seed: int,
    max_ranks: int = 4,
) -> list[Case]:
    """Return `number` random cases: every layout of 2 to `max_ranks` ranks in turn, all else at random.

    Args:
        axes: sizes to choose from for each mesh axis, outermost axis first.
        sizes: values to choose from for each size, the plainest first.

    Raises:
        ValueError: no layout has 2 to `max_ranks` ranks.

    Example:
        >>> [str(case) for case in draw_cases({"tp": (1, 2)}, {"tokens": (3,)}, 1, seed=0)]
        ['tp=2 tokens=3 accumulation=2 steps=2 ignored empty_experts seed=1']
    """
    every = [tuple(zip(axes, picked, strict=True)) for picked in product(*axes.values())]
    layouts = [layout for layout in every if 2 <= math.prod(n for _, n in layout) <= max_ranks]
    if not layouts:
        raise ValueError(f"layouts: none of {dict(axes)} has 2 to {max_ranks} ranks; give, say, tp=1,2")
    rng = random.Random(seed)
    cases = []
    for index in range(number):
        drawn: dict[str, Any] = {
            name: rng.random() < 0.5 for name, plain in FEATURES.items() if plain is False
        }
        cases.append(
            Case(
                layouts[index % len(layouts)],
                tuple((name, rng.choice(tuple(values))) for name, values in sizes.items()),
                seed=seed * 1_000_003 + index + 1,
                steps=rng.randint(1, 2),
                accumulation=rng.randint(1, 2),
                **drawn,
            )
        )
    return cases


def simpler(
    case: Case, axes: Mapping[str, Sequence[int]], sizes: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the changes of one field that make `case` simpler, in the order in which to try them.

    Features go first, then mesh axes get their smallest sizes, then sizes their plainest values.
    """
    changes: list[dict[str, Any]] = [
        {name: plain} for name, plain in FEATURES.items() if getattr(case, name) != plain
    ]
    for position, (axis, size) in enumerate(case.layout):
        for smaller in sorted(set(axes[axis])):
            layout = (*case.layout[:position], (axis, smaller), *case.layout[position + 1 :])
            if smaller < size and replace(case, layout=layout).world_size > 1:
                changes.append({"layout": layout})
    for position, (name, value) in enumerate(case.sizes):
        plainer = list(sizes[name]).index(value) if value in sizes[name] else 0
        for smaller in list(sizes[name])[:plainer]:
            changed = (*case.sizes[:position], (name, smaller), *case.sizes[position + 1 :])
            changes.append({"sizes": changed})
    return changes


def shrink(
    case: Case,
    fails: Callable[[Sequence[Case]], Sequence[bool]],
    axes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, Sequence[int]],
    rounds: int = 12,
) -> Case:
    """Shrink a failing case until none of its simplifications fails.

    A round tries all simplifications of one field at once, since starting ranks costs more than a case. Those
    that fail alone are then applied together, one after the other, and kept for as long as the case fails.

    Args:
        fails: tells for each case of a list if the same failure occurs.
        rounds: the most rounds; the case of the last one is returned.

    Example:
        >>> from fastmp.testing.differential.cases import Case
        >>> case = Case((("tp", 4),), (("tokens", 8),), clip=True, steps=2)
        >>> two_steps = lambda cases: [case.steps == 2 for case in cases]
        >>> str(shrink(case, two_steps, {"tp": (1, 2, 4)}, {"tokens": (1, 8)}))
        'tp=2 tokens=1 steps=2 seed=0'
    """
    for _ in range(rounds):
        # 1. All simplifications of one field.
        changes = simpler(case, axes, sizes)
        tried = [replace(case, **change) for change in changes]
        still = [change for change, bad in zip(changes, fails(tried) if tried else [], strict=True) if bad]
        if not still:
            return case
        # 2. Chains of them: the first, the first two, ... in one run. The longest that fails is kept.
        chain = [case]
        for change in still:
            (name,) = change
            if name not in ("layout", "sizes"):
                chain.append(replace(chain[-1], **change))
            else:
                chain.append(_merged(chain[-1], case, name, change[name]))
        chain = list(dict.fromkeys(chain[1:]))
        bad = [True, *(fails(chain[1:]) if chain[1:] else [])]  # the first is a simplification that fails
        case = [one for one, failed in zip(chain, bad, strict=True) if failed][-1]
    return case


def _merged(target: Case, origin: Case, name: str, changed: tuple[tuple[str, int], ...]) -> Case:
    """Return `target` with the pair of field `name` that `changed` changes against `origin`."""
    pairs, before = dict(getattr(target, name)), dict(getattr(origin, name))
    for key, value in changed:
        if value != before[key] and pairs[key] == before[key]:  # the plainest value comes first
            pairs[key] = value
    pairs_of = tuple(pairs.items())
    merged = replace(target, layout=pairs_of) if name == "layout" else replace(target, sizes=pairs_of)
    return merged if merged.world_size > 1 else target
