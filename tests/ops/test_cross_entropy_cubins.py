"""What Triton makes of the cross-entropy kernels: resources, access widths, exponentials."""

from __future__ import annotations

from dataclasses import replace

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

COLUMNS = {"loss grad": 128256}  # others: 8192
PASSES = {"stats": 1, "stats sum": 1, "grad": 1, "loss grad": 2}  # over the logits
WRITING = ("grad", "loss grad")


def launch(name: str, dtype: str, columns: int | None = None) -> Launch:
    """As for rows of so many columns, whose number and distance are multiples of 16."""
    data, stats = f"*{dtype}", f"*{compute(dtype)}"
    columns = columns or COLUMNS.get(name, 8192)
    sizes = cross_entropy.loss_grad_sizes if name == "loss grad" else cross_entropy.launch_sizes
    block, vec, num_warps = sizes(columns, ITEMSIZE[dtype])
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
    options = {"SMOOTHING": 0.1, "Z_LOSS": 1e-4, "BLOCK": block, "VEC": vec}
    if name == "loss grad":
        return Launch(
            cross_entropy.loss_grad_kernel,
            {"logits": data, "target": "*i64", "loss_grad": stats, "token_weight": stats, "loss": stats},
            ("row_stride", "columns", "vocab_size", "ignore_index"), options, num_warps,
            aligned=("row_stride", "columns", "vocab_size"),
        )  # fmt: skip
    tensors = {"logits": data, "out": data, "target": "*i64", "lse": stats, "grad_loss": stats}
    return Launch(
        cross_entropy.grad_kernel, {**tensors, "token_weight": stats},
        ("row_stride", "out_stride", "columns", "real", "vocab_start", "vocab_size", "ignore_index"),
        options, num_warps, aligned=("row_stride", "out_stride", "columns"),
    )  # fmt: skip


def per_thread(described: Launch) -> tuple[int, int]:
    """(elements, 16-byte vectors) of a block that one thread has."""
    elements = described.constants["BLOCK"] // (32 * described.num_warps)
    return elements, elements // described.constants["VEC"]


def bytes_in_flight(described: Launch, registers: int, itemsize: int) -> int:
    """What the programs that fit a multiprocessor load at a time."""
    threads = 32 * described.num_warps
    registers = -(-registers // 8) * 8  # as they are given out
    programs = min(REGISTERS // (registers * threads), 2048 // threads)
    return programs * described.constants["BLOCK"] * itemsize


@pytest.mark.parametrize(("name", "dtype", "arch"), cases((*PASSES, "merge"), without=[("merge", "fp64")]))
def test_kernel(name, dtype, arch):
    described = launch(name, dtype)
    cubin = described.compile(arch)
    check_resources(cubin, dtype, arch)
    if name == "merge":
        return
    elements, vectors = per_thread(described)
    edges = 2  # whole blocks and those that stick out of the row are loaded by different code
    assert wide_loads(cubin) >= edges * vectors * PASSES[name]
    assert wide_stores(cubin) >= edges * vectors * (name in WRITING)
    if dtype == "fp64":
        return
    # One a logit; in the statistics one a vector to rescale its sum, and one a vector at the end of the row.
    statistics = 2 * vectors if name != "grad" else 0
    assert 0 < exponentials(cubin) <= PASSES[name] * elements + statistics
    # 4.8 TB/s times 0.8 us over 132 multiprocessors; an A100 moves 2 TB/s.
    needed = 29_000 if arch >= 90 else 15_000
    assert bytes_in_flight(described, cubin.registers, ITEMSIZE[dtype]) >= needed


@pytest.mark.parametrize("name", PASSES)
def test_odd_vocabularies_are_read_and_written_sixteen_bytes_at_a_time(name):
    """50257 columns: nothing is known of where a row begins or how long it is."""
    described = replace(launch(name, "bf16", 50257), aligned=())
    cubin = described.compile(90)
    _, vectors = per_thread(described)
    assert cubin.spill_bytes == 0
    assert wide_loads(cubin) >= 2 * vectors * PASSES[name]
    assert wide_stores(cubin) >= 2 * vectors * (name in WRITING)


def test_the_second_read_of_a_row_asks_the_cache_for_it():
    ptx = launch("loss grad", "bf16").compile(90).ptx
    assert (
        "createpolicy.fractional.L2::evict_last" in ptx and "createpolicy.fractional.L2::evict_first" in ptx
    )


@pytest.mark.parametrize("columns", [1000, 16032, 32768, 50304, 131072, 151936, 262144, 300_000])
def test_rows_in_the_making_fit_the_second_level_cache(columns):
    """A row is half read, or half written, on average: 132 multiprocessors, and a cache of 50 MiB."""
    _, _, num_warps = cross_entropy.loss_grad_sizes(columns, 2)
    programs = REGISTERS // (64 * 32 * num_warps)
    assert 132 * programs * columns * 2 // 2 <= 50 << 20


@pytest.mark.parametrize("name", ["stats", "merge", "grad", "loss grad"])
def test_sizes_of_one_and_absent_tensors_compile(name):
    """The launcher makes constants of integers that equal 1 and of None."""
    described = launch(name, "bf16")
    absent = [name for name in ("token_weight",) if name in described.tensors]
    assert described.specialised(absent).compile(90).spill_bytes == 0


def test_rows_beyond_a_quarter_megabyte_compile():
    described = launch("loss grad", "bf16", 151936)
    cubin = described.compile(90)
    assert described.num_warps == 32 and cubin.spill_bytes == 0
    assert bytes_in_flight(described, cubin.registers, 2) >= 29_000
