"""Delta debugging over the fields of a case: the smallest one that still fails. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fastmp.testing.differential.cases import Case, simpler

__all__ = ["shrink"]


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
