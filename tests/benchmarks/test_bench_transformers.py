"""The benchmark of accelerated models measures every rival with the same weights."""

from __future__ import annotations

import argparse
import json
import os

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks import bench_transformers, bench_transformers_ranks, report
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.full


def tiny(config, **sizes):
    shared = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return config, {**shared, "num_key_value_heads": 2, "head_dim": 8, **sizes}, {}, (1, 8), (1, 8)


def test_every_rival_has_a_row_and_the_same_gradients(monkeypatch):
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setattr(bench_transformers, "CASES", {"tiny": tiny("Qwen3MoeConfig", **experts)})
    monkeypatch.setattr(bench_transformers, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(torch, "compile", lambda model: model)  # which takes minutes
    rows = bench_transformers.measure("tiny", torch.float32, "cpu", rounds=3)
    assert [row["by"] for row in rows] == ["fastmp", "eager", "grouped_mm", "torch.compile"]
    eager = rows[1]
    assert eager["of eager"] == eager["peak of eager"] == 1
    assert all(row["ms"] > 0 and row["peak MiB"] > 0 for row in rows)
    assert eager["tokens/s"] == pytest.approx(8e3 / eager["ms"])

    models = bench_transformers.models_of("tiny", torch.float32, "cpu")
    tokens = bench_transformers.tokens_of("tiny", "cpu")
    weights = [list(model.parameters()) for model in models.values()]
    assert all(a is b for others in weights for a, b in zip(others, weights[0], strict=True))
    ours, theirs, *others = (bench_transformers.step(model, tokens) for model in models.values())
    for gradients in (ours, *others):
        for a, b in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_a_model_that_does_not_fit_is_a_row_and_the_file_is_continued(monkeypatch, tmp_path, capsys):
    dense = tiny("LlamaConfig", intermediate_size=16)
    cases = {"Llama": dense, "another": dense}
    monkeypatch.setattr(bench_transformers, "CASES", cases)
    monkeypatch.setattr(bench_transformers, "peer", lambda *which: None)
    step = bench_transformers.step

    def of_ours_only(model, tokens):
        if model.state == "eager":
            raise torch.OutOfMemoryError("no room")
        return step(model, tokens)

    def models_of(*which, made=bench_transformers.models_of):
        models = made(*which)
        for name, model in models.items():
            model.state = name
        return models

    monkeypatch.setattr(bench_transformers, "step", of_ours_only)
    monkeypatch.setattr(bench_transformers, "models_of", models_of)
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["bench_transformers", "--rounds", "1", "--out", str(out)])
    assert bench_transformers.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 and {"raised" in row for row in rows if row["by"] == "fastmp"} == {False}
    assert {row.get("raised") for row in rows if row["by"] == "eager"} == {"OutOfMemoryError: no room"}
    assert "OutOfMemoryError: no room" in capsys.readouterr().out and report.read(out).tables
    out.write_text(json.dumps({"rows": rows[:4]}))
    done = lambda case, dtype, *rest: [rows[0] | {"case": case, "dtype": str(dtype)}]  # noqa: E731
    monkeypatch.setattr(bench_transformers, "measure", done)
    assert bench_transformers.main() == 0
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == ["Llama"] * 4 + ["another"] * 2


def test_memory_of_the_loss_is_seen(monkeypatch):
    wide = tiny("LlamaConfig", intermediate_size=16)
    wide[1]["vocab_size"] = 8192
    monkeypatch.setattr(bench_transformers, "CASES", {"wide": (*wide[:3], (2, 256), (1, 8))})
    ours, eager = bench_transformers.measure("wide", torch.float32, "cpu", rounds=3)
    assert ours["peak MiB"] < 0.6 * eager["peak MiB"]


def test_rivals_over_ranks_have_the_same_gradients(monkeypatch, tmp_path):
    if not hasattr(pytest.importorskip("transformers.distributed"), "DistributedConfig"):
        pytest.skip("transformers has no expert parallelism with token dispatch")
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setattr(bench_transformers_ranks, "CASE", "tiny")
    monkeypatch.setitem(bench_transformers.CASES, "tiny", tiny("Qwen3MoeConfig", **experts))
    bench_transformers_ranks.save_model(tmp_path, "cpu")

    def run(rank, world_size):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        options = argparse.Namespace(device="cpu", ep=2, rounds=3)
        return bench_transformers_ranks.measure(tmp_path, torch.float32, options)

    for rows in run_ranks(run, 2, timeout=200):
        assert [row["by"] for row in rows] == ["fastmp", "transformers", "transformers, FSDP2 alone"]
        assert rows[1]["of transformers"] == 1 and all(row["peak MiB"] > 0 for row in rows)
        norms = [row["grad_norm"] for row in rows]
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
