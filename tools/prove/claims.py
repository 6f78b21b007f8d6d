"""Claims and tables: what a chapter yields. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Claim:
    """Statement with the measured figure and its bound.

    found, bound: a figure, or words. held: None where it cannot be shown here; `found` says why, and it never
    counts as held. source: where a fact that is not computed here was published.
    """

    says: str
    found: float | str
    bound: float | str = ""
    held: bool | None = None
    source: str = ""

    @classmethod
    def at_most(cls, says: str, found: float, bound: float) -> Claim:
        """Return the claim that a figure is at most its bound; NaN fails."""
        return cls(says, found, f"at most {bound:g}", found <= bound)

    @classmethod
    def more_than(cls, says: str, found: float, bound: float, source: str = "") -> Claim:
        """Return the claim that a figure exceeds its bound, for errors of deliberately broken code."""
        return cls(says, found, f"more than {bound:g}", found > bound, source)

    @classmethod
    def all_of(cls, says: str, good: int, total: int, wrong: Sequence[str] = ()) -> Claim:
        """Return the claim that all items are right, naming the first wrong ones; an empty list fails."""
        named = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        return cls(says, f"{good} of {total}" + (f": {named}" if named else ""), "all", 0 < total == good)

    @classmethod
    def not_shown(cls, says: str, why: str) -> Claim:
        return cls(says, f"not shown: {why}")


@dataclass(frozen=True)
class Table:
    """Figures behind the claims: a row for each thing; on the page too, unless they are too many."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    on_page: bool = True


@dataclass
class Chapter:
    """Claims of a chapter and its duration."""

    name: str
    argument: str
    claims: list[Claim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, held: bool | None) -> int:
        return sum(claim.held is held for claim in self.claims)
