"""Triton kernels give the same bits in any order of their programs, and however late stores are seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import Mock

import pytest
import torch
from kernel_tools import set_programs
from marks import exhaustive, full
from torch import Tensor

from fastmp.ops import OPS, grouped_mm_launch, norm_triton
from fastmp.ops.core import launcher
from fastmp.testing.functions import Draw, evaluate, functions
from fastmp.testing.ops import run, samples

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
]
FUNCTIONS = functions()

# Kernels whose programs meet in memory: tickets, atomics, updates in place, sums that are read back.
MEETING = {"permutation", "bias_gelu_backward", "rms_norm_backward", "layer_norm_backward"}
MEETING |= {"latent_norm_rope_backward"}
MEETING |= {op for op in OPS if any(argument.alias_info for argument in OPS[op].overload._schema.arguments)}
MEETING -= {"exchange_barrier", "exchange_counts"}  # one program a rank: see test_exchange_triton.py
MEETING -= {"stash_reserve", "stash_release"}  # one program: see test_stash_triton.py
MAX_PROGRAMS = 64  # more take long


def few_and_many(some: int, many: int) -> pytest.MarkDecorator:
    """Numbers of orders, all even: two quickly, `some` in the full set, `many` in the exhaustive one."""
    return pytest.mark.parametrize("orders", [2, *full([some]), *exhaustive([many])])


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def same_bits(call: Callable[[], Sequence[Tensor]], seeds: Sequence[int]) -> int:
    """Compare `call` in the orders of `seeds` with one program after another; how many programs there were.

    Every other order has late stores.
    """
    from tools.interleave import interleaved

    want, programs = bits(call()), 0
    for seed in seeds:
        with interleaved(seed, late=seed % 2 == 0) as turns:
            assert bits(call()) == want, f"order {seed}"
        programs = max(programs, turns.programs)
    return programs


def drawn(name: str) -> Iterator[tuple[tuple, dict]]:
    """Cases of few programs: a regular one now and then where the awkward ones have but one or two."""
    many = name.startswith("grouped") or name.endswith("cross_entropy")
    for seed in range(10**6):
        options = {"small": True} if many or seed % 4 else {"rows": 12}
        yield FUNCTIONS[name].draw(Draw(random.Random(seed), torch.float32, **options))


@few_and_many(10, 200)
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_with_their_gradients(name, orders):
    done, most = 0, 0
    for case in drawn(name):
        seeds = range(done, min(done + 10, orders))
        most = max(most, same_bits(lambda case=case: evaluate(FUNCTIONS[name].call, *case), seeds))
        done += len(seeds)
        if done == orders:
            break
    assert most >= 2


@few_and_many(6, 60)
@pytest.mark.parametrize("op", sorted(op for op in MEETING if "triton" in OPS[op].implementations))
def test_kernels_that_meet_in_memory(op, orders):
    implementation, done = OPS[op].implementations["triton"], 0
    cases = samples(op, device="cpu", dtype=torch.float32)
    while cases and done < orders:
        case = cases.pop(0)
        seeds = range(done, done + 2)
        if 2 <= same_bits(lambda case=case: run(op, implementation, case), seeds) <= MAX_PROGRAMS:
            cases.append(case)
            done += 2
    assert done == orders


@few_and_many(6, 60)
def test_wide_norms_read_their_sums_back(orders, monkeypatch):
    """Two programs, whose partial sums pass through memory from one block of rows to the next."""
    monkeypatch.setattr(norm_triton, "num_programs", lambda *_: 2)
    columns = 4100
    assert norm_triton.backward_block_shape(columns, 4) is None
    x, grad = torch.randn(2, 9, columns, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 1.5, columns)
    _, _, stats = norm_triton.launch(False, x, None, weight, None, 1e-5)
    backward = (False, grad, None, x, weight, stats)
    assert same_bits(lambda: norm_triton.launch_backward(*backward), range(orders)) >= 2


@few_and_many(6, 60)
@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad_", "grouped_mlp_in"])
def test_grouped_products_by_descriptors(op, orders, monkeypatch):
    """As on a GPU that has a TMA unit; three programs walk over all tiles."""
    describe = Mock(wraps=grouped_mm_launch.descriptor)
    monkeypatch.setattr(launcher, "architecture_elsewhere", 90)
    monkeypatch.setattr(grouped_mm_launch, "descriptor", describe)
    set_programs(monkeypatch, 3)
    implementation = OPS[op].implementations["triton"]
    for case in samples(op, device="cpu", dtype=torch.float16):
        describe.reset_mock()
        programs = same_bits(lambda case=case: run(op, implementation, case), range(orders))
        if programs == 3 and describe.called:
            return
    raise AssertionError("no sample has descriptors and three programs")
