"""CPU launch overhead of a call: the rows of its table, and their meaning."""

import json

import pytest
import torch

from benchmarks import host_time
from fastmp.ops import OPS
from fastmp.ops.core import launcher


def test_rows_of_calls_layers_and_launches(tmp_path, capsys):
    host_time.main(
        ["--number", "1", "--rounds", "1", "--only", "softmax", "--out", str(tmp_path / "out.json")]
    )
    rows = json.loads((tmp_path / "out.json").read_text())["calls"]
    assert [(row["name"].split()[0], row["direction"]) for row in rows] == [
        ("softmax", "forward"), ("softmax", "both"), ("plain", "forward"), ("plain", "both"),
        ("scaled_masked_softmax_backward", "launch"), ("scaled_masked_softmax", "launch"),
    ]  # fmt: skip
    assert all(row["theirs_us"] > 0 for row in rows[:4]) and not any(row["theirs_us"] for row in rows[4:])
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_plain_calls_compute_what_torchs_compute():
    for name, (inputs, ours, torchs) in host_time.plain_calls().items():
        torch.testing.assert_close(
            ours(*inputs), torchs(*inputs), msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_row_is_a_ratio_or_a_time():
    ratio, time = (
        host_time.HostTime("op", "both", 30.0, theirs, most) for theirs, most in ((20.0, 1.3), (None, 40.0))
    )
    assert (ratio.value, ratio.ok, time.value, time.ok) == (1.5, False, 30.0, True)
    assert "1.50x (goal 1.3x)" in ratio.line() and time.line().endswith("30.0 us (goal 40 us)")


@pytest.mark.parametrize("op", ["permutation", "rms_norm_backward"])
def test_no_kernel_is_compiled_for_a_time_before_a_launch(op):
    before = dict(launcher._plans)
    assert host_time.of_launch(op, 1, 1).ours_us > 0
    assert launcher._plans == before and "triton" in OPS[op].implementations


@pytest.mark.parametrize("kind", host_time.LAYERS)
def test_plain_models_compute_what_ours_compute(kind):
    ours, plain = host_time.models(kind, 2)
    tokens = torch.randint(128, (1, 8))
    losses = ours.loss(tokens, tokens)
    (losses if kind == "dense" else losses.tokens).mean().backward()
    plain(tokens, tokens).backward()
    for mine, other in zip(plain.layers, ours.layers, strict=True):
        for module, name, parameter in mine.parts(other):
            torch.testing.assert_close(getattr(module, name).grad, parameter.grad, rtol=1e-3, atol=1e-5)
