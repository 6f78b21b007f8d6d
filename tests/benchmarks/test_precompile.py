"""Kernels that are compiled beforehand: those of the GPU tests and of the GPU check, listed without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from marks import full

from benchmarks import correct, gpu_rows, precompile
from fastmp.ops import OPS
from fastmp.testing.ops import DTYPES

FAMILIES = [family for family in correct.families() if correct.functions(family)]
SECONDS_A_KERNEL = 0.5  # to compile one and its launcher, in one process
ARCH = 90


@pytest.fixture
def seconds_of_a_test(request) -> float:
    return float(request.config.getini("timeout"))


def within(codes: dict, seconds: float) -> None:
    """Half of the time limit of a test is enough to compile all of its kernels."""
    assert 0 < len(codes) * SECONDS_A_KERNEL < seconds / 2


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *full(dtype for dtype in DTYPES if dtype != torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_test_of_functions_compiles_in_half_of_its_time(family, dtype, seconds_of_a_test):
    within(precompile.kernels_of_functions(family, ARCH, (dtype,)), seconds_of_a_test)


@pytest.mark.full
@pytest.mark.parametrize("op", sorted(op for op in OPS if "triton" in OPS[op].implementations))
def test_a_gpu_test_of_an_op_compiles_in_half_of_its_time(op, seconds_of_a_test):
    within(precompile.kernels_of_op(op, ARCH), seconds_of_a_test)


def test_the_timed_rows_of_ours_are_listed():
    """A public function by its ops, an op alone once; rivals launch nothing of ours."""
    item = gpu_rows.Item("functions", "activation", "bias_gelu", (16, 256, "tanh"))
    names = [code.kernel for code in precompile.kernels_of_items([item], ARCH)]
    alone = gpu_rows.Item("kernels", "activation", "bias_gelu", (16, 256))
    (forward,) = precompile.kernels_of_items([alone], ARCH)
    assert forward.kernel in names and len(names) > 1


@pytest.mark.full
def test_some_kernels_are_compiled_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = ["--arch", str(ARCH), "--families", "finite", "--processes", "1", "--most", "1"]
    assert precompile.main(["--phase", "correctness", *options]) == 0
    assert "1 kernels for sm_90" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("*.cubin"))) == 1
    with pytest.raises(SystemExit):
        precompile.main([])
    assert "no GPU found: choose the target, as arch=90" in capsys.readouterr().err
