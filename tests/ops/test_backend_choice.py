"""Which kernel serves a call on CUDA where an op has two, by counted bytes; pure functions of shapes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastmp.ops import cross_entropy_triton, grouped_mm_tiles
from fastmp.ops.core import backends, built

HOPPER, AMPERE, CONSUMER = 228 << 10, 164 << 10, 100 << 10  # shared memory of a multiprocessor


@pytest.mark.parametrize(
    ("columns", "itemsize", "gpu", "by_cuda"),
    [
        (16_032, 2, HOPPER, False),  # too short
        (32_000, 2, HOPPER, False),
        (50_304, 2, HOPPER, True),
        (128_256, 2, HOPPER, True),
        (151_936, 2, HOPPER, True),
        (262_144, 2, HOPPER, False),
        (128_256, 4, HOPPER, False),
        (128_256, 2, AMPERE, True),
        (128_256, 2, CONSUMER, False),
        (50_304, 2, CONSUMER, True),
    ],
)
def test_loss_and_gradient_at_once(columns, itemsize, gpu, by_cuda):
    moved = cross_entropy_triton.loss_grad_bytes(columns, itemsize, gpu)
    assert moved["cuda"] < moved["triton"] == 3 * columns * itemsize
    choice = cross_entropy_triton.loss_grad_prefers_cuda(columns, itemsize, gpu)
    assert choice == by_cuda


def test_a_row_that_shared_memory_holds_is_read_once():
    assert cross_entropy_triton.loss_grad_bytes(32_000, 2, HOPPER)["cuda"] == 2 * 64_000


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"arch": 100}, False),  # sm_90a is Hopper's alone
        ({"num_rows": 127 * 8}, False),
        ({"n": 1532}, False),  # rows that TMA cannot read
        ({"k": 4100}, False),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, True),
    ],
)
def test_grouped_gemms_of_cutlass(change, served):
    usual = {"num_rows": 256 * 8, "num_experts": 8, "n": 1536, "k": 4096, "dtype": torch.bfloat16, "arch": 90}
    assert grouped_mm_tiles.prefers_cutlass(**{**usual, **change}) is served


@pytest.fixture
def compiled_for(monkeypatch):
    """Return a function that sets what `_C_cuda` is compiled for and the GPU's compute capability."""

    def pretend(archs, capability=(9, 0)):
        monkeypatch.setattr(built, "build_record", lambda: {"archs": archs})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        built.has_code_for.cache_clear()

    yield pretend
    built.has_code_for.cache_clear()


def test_calls_go_to_the_kernel_that_the_arguments_prefer(compiled_for):
    compiled_for(["9.0"])
    serve = backends._cuda_or_triton(lambda x: len(x) > 2, lambda x: "cuda", lambda x: "triton")
    assert [serve(torch.empty(2)), serve(torch.empty(3))] == ["triton", "cuda"]


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (("8.0", "9.0", "10.0+PTX"), (8, 0), True),
        (("8.0", "9.0", "10.0+PTX"), (8, 9), True),
        (("8.0", "9.0", "10.0+PTX"), (9, 0), True),
        (("8.0", "9.0", "10.0+PTX"), (12, 0), True),
        (("8.0", "9.0", "10.0+PTX"), (7, 5), False),
        (("8.0", "9.0"), (10, 0), False),
        (("8.9",), (8, 0), False),
        (("9.0a",), (9, 0), True),
        (("9.0a",), (10, 0), False),
        (("10.0f",), (10, 3), True),
        ((), (9, 0), False),
    ],
)
def test_which_code_runs_on_which_gpu(archs, capability, expected):
    assert built.supports(archs, capability) is expected


@pytest.mark.parametrize(
    ("archs", "capability", "served"),
    [
        (["9.0"], (8, 0), "triton"),
        (["9.0a"], (10, 0), "triton"),
        (["9.0a"], (9, 0), "cuda"),
        (["8.0+PTX"], (9, 0), "cuda"),
        ([], (9, 0), "triton"),
    ],
)
def test_cuda_is_preferred_only_on_gpus_it_is_compiled_for(archs, capability, served, compiled_for):
    compiled_for(archs, capability)
    serve = backends._cuda_or_triton(lambda x: True, lambda x: "cuda", lambda x: "triton")
    assert serve(torch.empty(2)) == served


@pytest.mark.parametrize(("archs", "has_code"), [(["8.0+PTX"], False), (["8.0", "9.0+PTX"], True)])
def test_code_for_older_gpus_does_not_count_where_a_kernel_needs_newer_ones(archs, has_code, compiled_for):
    compiled_for(archs, (9, 0))
    assert built.has_code_for(0, 9.0) == has_code


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("requested", ["", "cross_entropy_loss_grad_=triton"])
def test_only_calls_without_a_named_backend_are_decided(exported, requested, compiled_for, monkeypatch):
    compiled_for(["9.0"])
    served = {}
    library = SimpleNamespace(impl=lambda name, kernel, key: served.update({key: kernel}))
    ours = SimpleNamespace(cross_entropy_loss_grad_=SimpleNamespace(default=lambda x: "cuda"))
    monkeypatch.setattr(backends, "_REQUESTED", requested)
    monkeypatch.setattr(backends, "CUDA_ABSENT", "" if exported else "not built")
    monkeypatch.setattr(backends, "LIBRARY", library)
    monkeypatch.setattr(torch.ops, "fastmp_cuda", ours, raising=False)
    given = {"triton": lambda x: "triton"}
    backend, reason = backends.serve_cuda("cross_entropy_loss_grad_", given, lambda x: len(x) > 8192)
    decided = exported and not requested
    assert backend == "triton" and ("faster" in reason) == decided
    assert served["CUDA"](torch.empty(8192)) == "triton"
    assert served["CUDA"](torch.empty(12288)) == ("cuda" if decided else "triton")
