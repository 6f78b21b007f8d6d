"""Find the smallest case in which parallel code differs from its dense module, and name the cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastmp.testing.differential.cases import Case, draw_cases, shrink
from fastmp.testing.differential.compare import Observation, observe
from fastmp.testing.differential.diagnose import Cause, diagnose
from fastmp.testing.differential.harness import Run, run_cases
from fastmp.testing.differential.subject import Subject

__all__ = ["Finding", "Verdict", "examine", "verify"]

# Causes that say no more than where: another tensor, or another case, may say more.
VAGUE = ("ranks disagree", "backward only", "wrong value", "constant factor", "wrong weights of the data")


@dataclass(frozen=True)
class Finding:
    """The first wrong tensor of a case.

    Attributes:
        case: the case.
        kind: "output", "gradient", "norm", "weight" or "crash".
        name: of the tensor; of the exception in a crash.
        step: optimizer step.
        rank: the rank with the largest error.
        error: that error; NaN where the tensor is not finite.
        scale: largest value among tensors of the kind.
        cause: likely cause.
        also: names of other wrong tensors of the same kind and step.
        text: traceback of a crash.
    """

    case: Case
    kind: str
    name: str
    step: int
    rank: int
    error: float
    scale: float
    cause: Cause
    also: tuple[str, ...] = ()
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary of JSON values."""
        cause = {"name": self.cause.name, "detail": self.cause.detail, "text": str(self.cause)}
        finite = self.error if self.error - self.error == 0 else str(self.error)
        own = {"kind": self.kind, "name": self.name, "step": self.step, "rank": self.rank, "error": finite}
        return {"case": self.case.to_json(), "arguments": str(self.case), **own, "scale": self.scale,
                "cause": cause, "also": list(self.also), "traceback": self.text}  # fmt: skip


@dataclass
class Verdict:
    """Result of `verify`.

    Attributes:
        cases: the cases that ran, without those of the shrinking.
        findings: one for each that failed.
        smallest: the finding of the smallest case; None if nothing was found.
    """

    cases: list[Case]
    findings: list[Finding] = field(default_factory=list)
    smallest: Finding | None = None


def verify(
    subject: Subject,
    *,
    cases: int | Sequence[Case] = 50,
    seed: int = 0,
    layouts: Mapping[str, Sequence[int]] | None = None,
    max_ranks: int = 4,
    shrinks: bool = True,
    timeout: float = 60,
) -> Verdict:
    """Compare outputs, gradients, norms and updated weights of parallel code with its dense module.

    Args:
        cases: number of random cases, or the cases themselves.
        seed: of the random cases.
        layouts: sizes of mesh axes to try instead of the subject's.
        max_ranks: most ranks of a random layout.
        shrinks: look for the smallest failing case.
        timeout: seconds for the cases of one number of ranks, beyond ten times what the dense module took.

    Raises:
        ValueError: there is nothing to compare: the dense module fails, or names of tensors do not match.
    """
    axes = {**subject.layouts, **(layouts or {})}
    drawn = draw_cases(axes, subject.sizes, cases, seed, max_ranks) if isinstance(cases, int) else list(cases)

    def findings(of: Sequence[Case]) -> list[Finding | None]:
        return [examine(subject, run) for run in run_cases(subject, of, timeout)]

    runs = run_cases(subject, drawn, timeout)
    verdict = Verdict([run.case for run in runs if run.ranks or run.crash])
    verdict.findings = [found for run in runs if (found := examine(subject, run))]
    if not verdict.findings:
        return verdict
    # 1. Start from the case whose cause is known best, with the fewest ranks.
    start = min(verdict.findings, key=lambda f: (f.cause.name in VAGUE, f.case.world_size, len(str(f.case))))
    verdict.smallest = start
    if any(run.crash and run.crash.hung for run in runs):  # it takes the whole timeout
        return verdict
    if not shrinks:
        verdict.smallest = _watched(subject, start, timeout)
        return verdict
    # 2. Shrink it while the same kind of tensor is wrong for the same reason.
    seen: dict[Case, Finding | None] = {start.case: start}

    def fails(of: Sequence[Case]) -> list[bool]:
        new = [case for case in dict.fromkeys(of) if case not in seen]
        seen.update(zip(new, findings(new), strict=True))
        return [_same(start, seen[case]) for case in of]

    smallest = seen[shrink(start.case, fails, axes, subject.sizes)]
    assert smallest is not None
    # 3. If that says nothing of the cause, run it once more and watch what backward reads.
    verdict.smallest = _watched(subject, smallest, timeout)
    return verdict


def _watched(subject: Subject, finding: Finding, timeout: float) -> Finding:
    """Return a finding of a vague cause with the cause that a watched run of its case shows, if any."""
    if finding.cause.name not in VAGUE:
        return finding
    (run,) = run_cases(subject, [finding.case], timeout, watch=True)
    if not run.overwritten:
        return finding
    return replace(finding, cause=Cause("overwritten memory", run.overwritten[0]))


def _same(start: Finding, other: Finding | None) -> bool:
    """Return True if a smaller case fails like the first one; a vague cause may become any other."""
    if other is None or other.kind != start.kind:
        return False
    return start.cause.name in VAGUE or other.cause.name == start.cause.name


def examine(subject: Subject, run: Run) -> Finding | None:
    """Return the first wrong tensor of a run with its likely cause; None if all are right, or none ran.

    The first is that of the earliest step and kind. Among gradients the backward pass reaches the last
    parameters first, so these come first; the first one with the most frequent known cause is reported.
    """
    if run.crash:
        crash = run.crash
        name = crash.error.partition(":")[0]
        cause = Cause("crash", crash.error)
        return Finding(run.case, "crash", name, 0, crash.rank, math.nan, 0.0, cause, text=crash.text)
    if not run.ranks:
        return None
    earlier: list[Observation] = []
    wrong: list[Observation] = []
    for seen in observe(subject, run):
        if wrong and (seen.key[0], seen.key[1]) != (wrong[0].key[0], wrong[0].key[1]):
            break
        (wrong if seen.bad else earlier).append(seen)
    if not wrong:
        return None
    if wrong[0].key[0] == "gradient":
        wrong.reverse()
    causes = [diagnose(run, one, earlier) for one in wrong]
    known = Counter(cause.name for cause in causes if cause.name not in VAGUE).most_common(1)
    index = next((i for i, cause in enumerate(causes) if known and cause.name == known[0][0]), 0)
    rank, error = wrong[index].worst
    kind, step, _, name = wrong[index].key
    also = dict.fromkeys(one.key[3] for one in wrong if one.key[3] != name)
    return Finding(run.case, kind, name, step, rank, error, wrong[index].scale, causes[index], tuple(also))
