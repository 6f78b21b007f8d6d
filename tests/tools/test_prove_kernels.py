"""The chapter of compiled kernels: each thing that may be wrong with code is a claim that is not held."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tools.cubins import cases
from tools.cubins.cases import CASES
from tools.cubins.compiled import kernel_names
from tools.cubins.facts import Facts
from tools.prove import kernels
from tools.prove.claims import Claim

COMPILED = [
    kernels.Compiled("a case", name, arch, 64, 0, 0, 4096, 8, 4, ("TMA",), ())
    for name in kernel_names()
    for arch in kernels.ARCHS
]


def held(found):
    return [each.held for each in kernels.judged(found, "all compile") if isinstance(each, Claim)]


def test_what_is_wrong_with_code_is_not_held():
    first, *others = COMPILED
    assert held(COMPILED) == [True] * 4
    assert held(others) == [False, True, True, True]  # a kernel that is not compiled for one architecture
    assert held([replace(first, spilled=8), *others]) == [True, False, True, True]
    assert held([replace(first, shared=1 << 20), *others]) == [True, True, False, True]
    assert held([replace(first, wrong=("8 registers",)), *others]) == [True, True, True, False]


def test_facts_that_are_not_kept_reach_the_chapter(monkeypatch):
    case, _ = CASES["first_not_finite"]
    monkeypatch.setitem(cases.CASES, "first_not_finite", (case, (Facts(stores=100),)))
    (found,) = kernels._compile((90, "first_not_finite"))
    assert found.wrong and found.kernel == "first_not_finite_kernel" and found.registers > 8


def test_without_triton_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(kernels, "nothing_is_compiled", lambda: "Triton is not installed")
    (claim,) = kernels.claims()
    assert claim.held is None and claim.found == "not shown: Triton is not installed"


def test_kernels_of_all_modules_are_found():
    assert {"sum_strips_kernel", "sum_blocks_kernel", "adamw_kernel", "merge_kernel"} <= {*kernel_names()}


@pytest.mark.exhaustive
def test_every_kernel_is_in_a_case_and_keeps_its_facts():
    said = [each for each in kernels.claims() if isinstance(each, Claim)]
    assert [each.held for each in said] == [True] * 4, said
