"""Which kernel serves a call on CUDA where an op has two, by counted bytes; pure functions of shapes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastmp.ops import cross_entropy_triton, norm_triton, registry

HOPPER, AMPERE, CONSUMER = 228 << 10, 164 << 10, 100 << 10  # shared memory of a multiprocessor


@pytest.mark.parametrize(
    ("columns", "itemsize", "gpu", "by_cuda"),
    [
        (32_000, 2, HOPPER, True),
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
    ("columns", "itemsize", "gpu", "arch", "by_cuda"),
    [
        (8192, 2, HOPPER, 90, False),  # Triton holds the row in registers
        (12288, 2, HOPPER, 90, True),
        (12288, 2, HOPPER, 100, True),
        (12288, 2, AMPERE, 80, False),  # no clusters
        (65_216, 2, HOPPER, 90, True),
        (65_536, 2, HOPPER, 90, False),  # beyond the shared memory of eight blocks
        (8192, 4, HOPPER, 90, True),
        (27_648, 2, CONSUMER, 120, True),
        (28_672, 2, CONSUMER, 120, False),
    ],
)
def test_backward_of_norms(columns, itemsize, gpu, arch, by_cuda):
    moved = norm_triton.backward_bytes(columns, itemsize, has_grad_total=True, centred=False)
    assert moved["cuda"] == 4 * columns * itemsize < moved["triton"]
    assert norm_triton.backward_prefers_cuda(columns, itemsize, gpu, arch) == by_cuda


def test_calls_go_to_the_kernel_that_the_arguments_prefer():
    serve = registry._by_bytes(lambda x: x > 2, lambda x: ("cuda", x), lambda x: ("triton", x))
    assert [serve(2), serve(3)] == [("triton", 2), ("cuda", 3)]


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("requested", ["", "rms_norm_backward=triton"])
def test_only_calls_without_a_named_backend_are_decided(exported, requested, monkeypatch):
    served = {}
    library = SimpleNamespace(impl=lambda name, kernel, key: served.update({key: kernel}))
    ours = SimpleNamespace(rms_norm_backward=SimpleNamespace(default=lambda columns: "cuda"))
    monkeypatch.setattr(registry, "_REQUESTED", requested)
    monkeypatch.setattr(registry, "_CUDA_ABSENT", "" if exported else "not built")
    monkeypatch.setattr(registry, "LIBRARY", library)
    monkeypatch.setattr(torch.ops, "fastmp_cuda", ours, raising=False)
    given = {"triton": lambda columns: "triton"}
    backend, reason = registry._serve_cuda("rms_norm_backward", given, lambda columns: columns > 8192)
    decided = exported and not requested
    assert backend == "triton" and ("fewer bytes" in reason) == decided
    assert served["CUDA"](8192) == "triton"
    assert served["CUDA"](12288) == ("cuda" if decided else "triton")
