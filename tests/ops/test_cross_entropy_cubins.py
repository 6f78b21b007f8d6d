"""What Triton makes of the cross-entropy kernels: resources, access widths, exponentials."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from cubin_tools import (
    ITEMSIZE,
    REGISTERS,
    Launch,
    cases,
    check_resources,
    compute,
    exponentials,
    wide_loads,
    wide_stores,
)

from fastmp.ops import cross_entropy_triton as cross_entropy

COLUMNS = 8192


def launch(name: str, dtype: str) -> Launch:
    """As for rows of 8192 columns."""
    data, stats = f"*{dtype}", f"*{compute(dtype)}"
    block, vec, num_warps = cross_entropy.launch_sizes(COLUMNS, ITEMSIZE[dtype])
    if name.startswith("stats"):
        return Launch(
            cross_entropy.stats_kernel, {"logits": data, "target": "*i64", "out": stats},
            ("row_stride", "real", "vocab_start"),
            {"WITH_SUM": name == "stats sum", "BLOCK": block, "VEC": vec}, num_warps, aligned=("row_stride",),
        )  # fmt: skip
    if name == "merge":
        return Launch(
            cross_entropy.merge_kernel,
            {"stats": stats, "target": "*i64", "token_weight": stats, "loss": stats, "lse": stats},
            ("tokens", "shards", "vocab_size", "ignore_index"),
            {"WIDTH": 4, "SMOOTHING": 0.1, "Z_LOSS": 1e-4, "BLOCK": 128}, 4,
        )  # fmt: skip
    tensors = {"logits": data, "out": data, "target": "*i64", "lse": stats, "grad_loss": stats}
    return Launch(
        cross_entropy.grad_kernel, {**tensors, "token_weight": stats},
        ("row_stride", "out_stride", "columns", "real", "vocab_start", "vocab_size", "ignore_index"),
        {"SMOOTHING": 0.1, "Z_LOSS": 1e-4, "BLOCK": block, "VEC": vec}, num_warps,
        aligned=("row_stride", "out_stride", "columns"),
    )  # fmt: skip


NAMES = ("stats", "stats sum", "merge", "grad")


@pytest.mark.parametrize(("name", "dtype", "arch"), cases(NAMES, without=[("merge", "fp64")]))
def test_kernel(name, dtype, arch):
    described = launch(name, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    if name == "merge":
        return
    per_thread = described.constants["BLOCK"] // (32 * described.num_warps)
    vectors = per_thread // described.constants["VEC"]
    assert wide_loads(cubin) >= 2 * vectors, "whole blocks or edges are not read 16 bytes at a time"
    assert name != "grad" or wide_stores(cubin) >= 2 * vectors, "edges are not written 16 bytes at a time"
    assert 2 * 32 * described.num_warps * cubin.registers <= REGISTERS, "one program fills a multiprocessor"
    if name.startswith("stats") and dtype != "fp64":
        copies = 2  # whole blocks and edges are two copies of the loop's body
        assert exponentials(cubin) <= copies * 1.3 * per_thread + 32


@pytest.mark.parametrize("name", ["stats", "merge", "grad"])
def test_sizes_of_one_and_absent_tensors_compile(name):
    """The launcher makes constants of integers that equal 1 and of None."""
    described = launch(name, "bf16")
    absent = [name for name in ("token_weight",) if name in described.tensors]
    assert described.specialised(absent).compile(90).spill_bytes == 0
