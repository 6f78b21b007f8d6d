"""Differential tests: drawing and shrinking of cases, causes from tensors, and the command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from fastmp.apps.cli import main
from fastmp.apps.verify import load_subject
from fastmp.testing.differential.cases import Case, draw_cases, shrink, simpler
from fastmp.testing.differential.compare import Observation, observe, part
from fastmp.testing.differential.diagnose import CAUSES, diagnose
from fastmp.testing.differential.harness import Reference, Run, SavedTensors
from fastmp.testing.differential.subject import Subject
from fastmp.testing.differential.verification import verify

AXES = {"dp": (1, 2), "tp": (1, 2, 4)}
SIZES = {"tokens": (3, 1, 8), "hidden": (4, 8)}
TP2 = Case((("tp", 2),))
DP2_TP2 = Case((("dp", 2), ("tp", 2)))


def test_draws_every_layout_and_feature() -> None:
    cases = draw_cases(AXES, SIZES, 40, seed=3)
    assert {case.layout for case in cases} == {
        (("dp", dp), ("tp", tp)) for dp in (1, 2) for tp in (1, 2, 4) if 2 <= dp * tp <= 4
    }
    for name in ("uneven", "empty_experts", "ignored", "clip", "poison", "steps", "accumulation"):
        assert len({getattr(case, name) for case in cases}) == 2, name
    assert cases == draw_cases(AXES, SIZES, 40, seed=3) != draw_cases(AXES, SIZES, 40, seed=4)
    assert len({case.seed for case in cases}) == 40


def test_case_is_read_back_from_its_text() -> None:
    for case in draw_cases(AXES, SIZES, 20, seed=0):
        assert Case.parse(str(case), tuple(AXES), tuple(SIZES)) == case


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=2", r"dp, tokens, hidden missing"),
        ("dp=1 tp=x tokens=1 hidden=1", r"expected tp=NUMBER"),
        ("dp=1 tp=2 tokens=1 hidden=1 fast", "'fast' is none of"),
    ],
)
def test_wrong_case(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Case.parse(text, tuple(AXES), tuple(SIZES))


def test_no_layout() -> None:
    with pytest.raises(ValueError, match=r"none of .* has 2 to 4 ranks"):
        draw_cases({"tp": (1,)}, {}, 1, seed=0)


def test_coordinates_and_parts_of_the_data() -> None:
    case = Case((("dp", 2), ("cp", 2), ("tp", 2)))
    assert case.coordinates(5) == {"dp": 1, "cp": 0, "tp": 1}
    assert [case.data_index(rank, ("dp", "cp")) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert case.num_parts(("dp", "tp")) == 4


@pytest.mark.parametrize(
    "needs",
    [
        lambda case: case.axis("tp") == 2 and case.clip,
        lambda case: case["tokens"] != 3 and case.steps == 2,
        lambda case: case.axis("dp") == 2 and case.uneven and case["hidden"] == 8,
        lambda case: True,
    ],
)
def test_shrinks_to_what_fails_only_with_all_it_has(needs) -> None:
    found = 0
    for case in draw_cases(AXES, SIZES, 60, seed=1):
        if needs(case):
            found += 1
            smallest = shrink(case, lambda cases: [needs(one) for one in cases], AXES, SIZES)
            assert needs(smallest)
            for change in simpler(smallest, AXES, SIZES):
                assert not needs(replace(smallest, **change)), (smallest, change)
    assert found


# One tensor on the ranks of a case, and the cause it must be given.
WHOLE = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.5]], dtype=torch.float64)
NOISE = torch.tensor([[0.3, 1.0, -0.7], [0.1, 2.0, 0.6]], dtype=torch.float64)


def cause(case: Case, values: list[torch.Tensor], placement=None, kind: str = "gradient", **reference) -> str:
    placement = placement or {}
    reference.setdefault("outputs", {("output", 0, -1, "weight"): [WHOLE, WHOLE]})
    held = dict(enumerate(values))
    expected = {}
    for rank in held:
        fitting = part(case, WHOLE, held, placement, rank)
        expected[rank] = WHOLE if fitting is None else fitting
    wrong = Observation(case, (kind, 0, -1, "weight"), held, expected, placement, 3.0, 1e-9)
    assert wrong.bad
    found = diagnose(Run(case, Reference(**reference)), wrong, [])
    assert found.name in CAUSES
    return found.name


def test_names_causes() -> None:
    nan = WHOLE.clone()
    nan[1, 1] = torch.nan
    assert cause(TP2, [nan, WHOLE]) == "not finite"
    assert cause(replace(TP2, poison=True), [WHOLE, nan]) == "unwritten memory"
    assert cause(TP2, [WHOLE, 0 * WHOLE]) == "zero"
    assert cause(TP2, [NOISE, WHOLE - NOISE]) == "missing all-reduce"
    assert cause(TP2, [WHOLE + NOISE, WHOLE - NOISE]) == "missing average"
    assert cause(TP2, [2 * WHOLE, 2 * WHOLE]) == "counted n times"
    assert cause(TP2, [WHOLE / 2, WHOLE / 2]) == "divided by the group size"
    assert cause(TP2, [-WHOLE, -WHOLE]) == "wrong sign"
    assert cause(TP2, [3 * WHOLE, 3 * WHOLE]) == "constant factor"
    assert cause(TP2, [WHOLE, WHOLE + NOISE]) == "ranks disagree"
    assert cause(TP2, [WHOLE + NOISE] * 2) == "backward only"
    assert cause(TP2, [WHOLE + NOISE] * 2, kind="output") == "wrong value"
    assert cause(TP2, [WHOLE + torch.tensor(2.0).log()] * 2, kind="output") == "log of the group size"
    assert cause(TP2, [WHOLE[:, :2], WHOLE[:, :2]], {"tp": 1}) == "wrong shape"


def test_names_wrong_places() -> None:
    shards = [WHOLE[:1], WHOLE[1:]]
    assert cause(TP2, shards[::-1], {"tp": 0}) == "wrong order"
    assert cause(TP2, [WHOLE.flip(0)] * 2) == "wrong order"
    assert cause(TP2, [WHOLE.flatten().roll(1).view(2, 3)] * 2) == "wrong order"
    # rank 1 = (dp 0, tp 1) has the shard of dp 0, rank 2 = (dp 1, tp 0) that of dp 1: index on the other axis
    assert cause(DP2_TP2, [shards[0], shards[0], shards[1], shards[1]], {"tp": 0}) == "wrong group"
    # partial sums along tp, added along dp
    partial = [NOISE, WHOLE - NOISE]
    assert cause(DP2_TP2, [2 * partial[0], 2 * partial[1]] * 2) == "wrong group"


def test_names_weights_of_the_data() -> None:
    pieces = {(0, 0): NOISE, (0, 1): 5 * WHOLE - NOISE}  # tokens 2 and 3
    reference = {"partial": {(0, "weight"): pieces}, "counts": {0: {(0, 0): 2.0, (0, 1): 3.0}}}
    case = Case((("dp", 2),))

    def weighed(a: float, b: float) -> str:
        value = (a * pieces[0, 0] + b * pieces[0, 1]) / 5
        return cause(case, [value, value], **reference)

    assert weighed(5 / 4, 5 / 6) == "local token counts"
    assert weighed(1, 0) == "part of the data lost"
    assert weighed(1, 2) == "wrong weights of the data"


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


class Replicated(Subject):
    """Data parallelism; the reduction of gradients, what breaks, is the subclass's."""

    layouts: ClassVar = {"dp": (1, 2)}

    def dense(self, case: Case) -> nn.Module:
        return Layers()

    def parallel(self, dense, ranks):
        return dense

    def inputs(self, case: Case, generator):
        return [torch.randn(case["tokens"], 3, generator=generator)]

    def synchronize(self, model, ranks) -> None:
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad, group=ranks.group("dp"))


class Unsynchronized(Replicated):
    def synchronize(self, model, ranks) -> None:
        pass


class StaleGradient(Replicated):
    def synchronize(self, model, ranks) -> None:
        super().synchronize(model, ranks)
        old = getattr(model, "old", None)
        model.old = [param.grad.clone() for param in model.parameters()]
        for param, grad in zip(model.parameters(), old or []):
            param.grad = grad


class Raises(Replicated):
    def synchronize(self, model, ranks) -> None:
        if ranks.case.accumulation == 2:
            raise ArithmeticError("two microbatches")
        super().synchronize(model, ranks)


class Misnamed(Replicated):
    def dense_name(self, name: str, ranks) -> str:
        return "module." + name


def test_finds_the_smallest_case() -> None:
    assert verify(Replicated(), cases=6).smallest is None
    found = verify(Unsynchronized(), cases=6).smallest
    assert found is not None
    assert (found.kind, found.cause.name, str(found.cause)[:27]) == (
        "gradient", "missing all-reduce", "missing all-reduce (over dp",
    )  # fmt: skip
    assert str(found.case).startswith("dp=2 tokens=2 seed=")


def test_finds_values_of_an_earlier_step() -> None:
    found = verify(StaleGradient(), cases=6, shrinks=False).smallest
    assert found is not None
    assert (found.kind, found.step, found.cause.name) == ("gradient", 1, "stale value")


def test_crash_is_a_finding_of_its_own_case() -> None:
    cases = [Case((("dp", 2),), (("tokens", 2),), accumulation=number) for number in (1, 2, 1)]
    verdict = verify(Raises(), cases=cases, shrinks=False)
    assert [found.case for found in verdict.findings] == [cases[1]]
    assert verdict.smallest is not None
    assert "ArithmeticError: two microbatches" in str(verdict.smallest.cause)
    assert "synchronize" in verdict.smallest.text


class Hangs(Replicated):
    def synchronize(self, model, ranks) -> None:
        if ranks.rank == 1:  # and rank 0 waits
            time.sleep(100)
        super().synchronize(model, ranks)


@pytest.mark.full
def test_hang_is_a_finding() -> None:
    verdict = verify(Hangs(), cases=3, timeout=3)
    found = verdict.smallest
    assert found is not None and len(verdict.cases) == 1  # the others do not wait for the timeout as well
    assert found.kind == "crash" and "all_reduce" in found.text and "hung" in str(found.cause)


def test_names_must_match() -> None:
    with pytest.raises(ValueError, match=r"no rank has the dense module's parameter '0.weight'"):
        verify(Misnamed(), cases=1)


def test_observes_shards_and_partial_sums() -> None:
    subject = Subject()
    key = ("gradient", 0, -1, "weight")
    ranks = [{key: (WHOLE[:1], {"tp": 0})}, {key: (WHOLE[1:], {"tp": 0})}]
    (seen,) = observe(subject, Run(TP2, Reference(values={key: WHOLE}), ranks))
    assert not seen.bad and seen.worst[1] == 0
    ranks = [{key: (NOISE, {"tp": "sum"})}, {key: (WHOLE - NOISE, {"tp": "sum"})}]
    (seen,) = observe(subject, Run(TP2, Reference(values={key: WHOLE}), ranks))
    assert not seen.bad


USER = """
import torch, torch.distributed as dist
from torch import full, nn  # an import is no part of the subject

layouts = {"dp": (2,)}

def dense(case):
    return nn.Linear(3, 2)

def parallel(dense, ranks):
    return dense

def inputs(case, generator):
    return [torch.randn(case["tokens"], 3, generator=generator)]

def synchronize(model, ranks):
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad SIGN= 2
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = tmp_path / "right_layer.py", tmp_path / "wrong_layer.py"
    right.write_text(USER.replace("        param.grad SIGN= 2\n", ""))
    wrong.write_text(USER.replace("SIGN", "*"))
    assert main(["verify", str(right), "--cases", "3"]) == 0
    assert "3 cases, 0 failed" in capsys.readouterr().out
    assert main(["verify", str(wrong), "--cases", "3"]) == 1
    said = capsys.readouterr().out
    assert "gradient of bias, step 0" in said and "counted n times (2 times, the size of dp)" in said
    # The command of the report finds the same alone.
    case = said.split("--case ")[1].strip().strip("'")
    assert main(["verify", str(wrong), "--case", case, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["cases"] == result["failed"] == 1 and result["finding"]["arguments"] == case
    assert result["finding"]["cause"]["name"] == "counted n times"


def test_misuse_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "no_layer.py"]) == 2
    assert "expected a Python file" in capsys.readouterr().err
    two = tmp_path / "two_subjects.py"
    two.write_text(
        "from fastmp.testing.differential import Subject\nclass A(Subject): pass\nclass B(Subject): pass\n"
    )
    with pytest.raises(ValueError, match=r"got A, B; name one: .*two_subjects.py:A"):
        load_subject(str(two))
    with pytest.raises(ValueError, match="no subclass of Subject is named 'C'"):
        load_subject(f"{two}:C")
    broken = tmp_path / "broken_layer.py"
    broken.write_text("import no_such_module\n")
    assert main(["verify", str(broken)]) == 2
    assert "cannot be imported: ModuleNotFoundError" in capsys.readouterr().err
    assert main(["verify", str(two) + ":A", "--layouts", "tp"]) == 2
    assert "expected AXIS=SIZE,SIZE" in capsys.readouterr().err
    assert main(["verify", str(two) + ":A", "--cases", "1"]) == 2
    assert "the dense module failed" in capsys.readouterr().err


def test_sees_writes_to_saved_tensors_that_autograd_does_not() -> None:
    x = torch.tensor([0.5, torch.nan], requires_grad=True)
    for write in (False, True):
        with (saved := SavedTensors()):
            y = x.exp()
        if write:
            y.data.zero_()
        y.sum().backward()
        name = Path(__file__).name
        lines = [line.partition(":")[0] for line in saved.overwritten]
        assert lines == [f"(2,), saved in {name}"] * write


def test_running_statistics_are_no_overwritten_memory() -> None:
    """A batch norm saves them for its backward, which reads them in evaluation mode only."""
    norm = torch.nn.BatchNorm1d(3)
    for buffers, number in (((), 1), (norm.buffers(), 0)):
        with (saved := SavedTensors(buffers)):
            y = norm(torch.randn(4, 3, requires_grad=True))
        y.sum().backward()
        assert len(saved.overwritten) == number
