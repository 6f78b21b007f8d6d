"""Checks that remember what they have passed still find every mistake."""

from __future__ import annotations

import pytest
import torch

from fastmp.ops.core import backends, checks, contracts
from fastmp.ops.core.contracts import Contract


def test_a_call_is_checked_once_a_kind():
    """Values and strides are no part of the kind; shapes, dtypes, devices and other arguments are."""
    seen = []

    @checks.memoized
    def check(name, x, other, k):
        seen.append((name, k))
        checks.require(x.dtype == torch.float32, "{}: got {}", name, x.dtype)

    x = torch.zeros(3, 4)
    for again in (x, x + 1, torch.zeros(4, 3).t(), torch.nn.Parameter(x)):
        check("a", again, None, 1)
    assert len(seen) == 1
    more = [("b", x, None, 1), ("a", x, x, 1), ("a", x[:2], None, 1), ("a", x.to("meta"), None, 1)]
    for number, arguments in enumerate([*more, ("a", x, None, 2)], start=2):
        check(*arguments)
        check(*arguments)
        assert len(seen) == number
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a: got torch\.float64"):
            check("a", x.double(), None, 1)


@pytest.mark.parametrize("signature", (backends.signature, backends._signature))
def test_keys_of_calls_differ_by_kind_and_place(signature):
    class Own(torch.Tensor):
        pass

    x = torch.zeros(3, 4)
    kinds = [x, x.double(), x.to("meta"), x[:2], x.view(2, 6), x.view(12), x.view(3, 4, 1), None, 1, "x"]
    calls = [*((kind,) for kind in kinds), (x, None), (None, x), (x, x), ()]
    keys = [signature(*call) for call in calls]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert signature(x, 1) == signature(torch.nn.Parameter(x.t().contiguous().t() + 1), 1)
    assert signature(1, x.as_subclass(Own)) is None


def test_what_has_no_hash_is_checked_every_time():
    seen = []
    check = checks.memoized(lambda x, sizes: seen.append(sizes))
    for _ in range(2):
        check(torch.zeros(3), [1, 2])
    assert len(seen) == 2


def test_few_calls_are_remembered(monkeypatch):
    monkeypatch.setattr(contracts, "_MAX_PASSED", 3)
    seen = []
    check = checks.memoized(seen.append)
    for number in (*range(4), 3, 0, 0):
        check(number)
    assert seen == [0, 1, 2, 3, 0]


def test_a_contract_takes_any_name_of_an_argument():
    """Also those that the grammar uses for the first tensor and its number of dimensions."""
    schema = torch._C.parse_schema("fastmp::f(Tensor x, int first, int dims, Tensor mask) -> Tensor")
    contract = Contract(schema, "x (..., N) floating; mask (~) bool; 4 <= dims <= first")
    x, mask = torch.ones(2, 3), torch.ones(3, dtype=torch.bool)
    contract((x, 6, 5, mask))
    for wrong, message in (
        ((x, 6, 3, mask), "expected 4 <= dims <= first, got dims = 3, first = 6"),
        ((x, 6, 7, mask), "expected 4 <= dims <= first, got dims = 7, first = 6"),
        ((x, 6, 5, mask[:2]), r"expected mask \(~\) bool, got \(2,\)"),
    ):
        with pytest.raises(ValueError, match=f"^f: {message}"):
            contract(wrong)
    of_tensor = Contract(
        torch._C.parse_schema("fastmp::g(Tensor x) -> Tensor"), "x (...) any; 2 <= dims <= 3"
    )
    of_tensor((x,))
    with pytest.raises(ValueError, match=r"^g: expected 2 <= dims <= 3, got dims = 1"):
        of_tensor((mask,))
