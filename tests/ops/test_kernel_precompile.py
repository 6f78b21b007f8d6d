"""Warm-up: what is compiled beforehand is what is launched later, whatever the number of tokens."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from every_op_tools import op_backends
from launch_tools import recording as standing_in
from triton.runtime import driver

from fastmp import ops
from fastmp.config import GPTConfig, MoEConfig
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.placement import Placement
from fastmp.ops import OPS, activation, precompile
from fastmp.ops.core import launcher
from fastmp.testing.ops import run, samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "backend"), op_backends(("triton",)))
def test_a_code_is_compiled_for_what_triton_would(op, backend, dtype, monkeypatch):
    """The class of each argument gives Triton's key for the argument itself."""
    launches = 0

    def compare(kernel, programs, arguments, constants):
        nonlocal launches
        launches += 1
        theirs = kernel.warmup(*arguments, grid=(1,), **constants)
        found, examples = precompile.Code.of(kernel, arguments, constants).call()
        assert found is kernel
        assert found.warmup(*examples, grid=(1,), **constants).code == theirs.code

    with standing_in():
        monkeypatch.setattr(launcher, "launch", compare)
        for arguments in samples(op, device="cpu", dtype=dtype):
            run(op, OPS[op].implementations[backend], arguments)
    assert launches


def test_random_batches_compile_nothing_after_warm_up():
    """200 batches of an expert layer, and of the rows that other ranks would send it."""
    moe = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=64, expert_bias=True)
    meta = {"device": "meta", "dtype": torch.bfloat16}
    config = GPTConfig(num_layers=1, hidden_size=256, num_heads=2, activation="swiglu", moe=moe)
    layer = MoELayer(config, Placement(**meta))
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    weight = torch.empty(8, 64, 192, **meta)
    norm = torch.empty(256, **meta, requires_grad=True)

    def batch(tokens: int, rows: int) -> None:
        x = torch.empty(tokens, 2, 256, **meta, requires_grad=True)
        hidden = layer(ops.rms_norm(x, norm))
        torch.autograd.backward(hidden[0], torch.empty_like(hidden[0]))
        sent = torch.empty(rows, 256, **meta)
        received = ops.permute(sent, torch.empty(rows, 1, dtype=torch.int32, device="meta"), rows + tokens)
        ops.grouped_mm(received[:, :192], weight, offsets)

    rng = random.Random(0)
    with precompile.recording(90) as warmed:
        batch(1000, 1000)
    assert len(warmed) < 60
    with precompile.recording(90) as launched:
        for _ in range(200):
            batch(rng.randrange(1, 6000), rng.randrange(1, 50_000))
    assert len(launched) > 20
    assert set(launched) <= set(warmed)


@pytest.mark.full
def test_kernels_are_compiled_into_the_cache_by_other_processes(tmp_path, monkeypatch):
    """Compiling one again, as training would, adds nothing to the cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    said = []
    count = ops.warm_up(lambda: ops.bias_gelu(x), arch=90, processes=1, progress=lambda *of: said.append(of))
    assert count == 1
    assert said == [(0, 1), (1, 1)]
    files = sorted(tmp_path.rglob("*"))
    assert any(file.suffix == ".cubin" for file in files)
    with precompile.recording(90) as codes:
        ops.bias_gelu(x)
    (code,) = codes
    kernel, examples = code.call()
    assert kernel is activation.bias_gelu_kernel
    monkeypatch.setattr(driver, "_active", precompile.AbsentGPU(90))
    kernel.device_caches.pop(90, None)
    kernel.warmup(*examples, grid=(1,), **dict(code.constants))
    assert sorted(tmp_path.rglob("*")) == files


def test_mistakes_are_told(monkeypatch):
    with pytest.raises(ValueError, match="no GPU found: choose the target"):
        ops.warm_up()
    monkeypatch.setattr("fastmp.ops.core._triton.INTERPRETED", True)
    with pytest.raises(ValueError, match="warm_up: nothing is compiled: TRITON_INTERPRET=1"):
        ops.warm_up(arch=90)
