"""The benchmark of accelerated models measures every rival with the same weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks import bench_transformers

pytestmark = pytest.mark.full


def tiny(config, **sizes):
    shared = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return config, {**shared, "num_key_value_heads": 2, "head_dim": 8, **sizes}, {}, (1, 8), (1, 8)


def test_every_rival_has_a_row_and_the_same_gradients(monkeypatch):
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setattr(bench_transformers, "CASES", {"tiny": tiny("Qwen3MoeConfig", **experts)})
    rows = bench_transformers.measure("tiny", torch.float32, "cpu", rounds=3)
    assert [row["by"] for row in rows] == ["fastmp", "eager", "grouped_mm"]
    eager = rows[1]
    assert eager["of eager"] == eager["peak of eager"] == 1
    assert all(row["ms"] > 0 and row["peak MiB"] > 0 for row in rows)

    models = bench_transformers.models_of("tiny", torch.float32, "cpu")
    tokens = bench_transformers.tokens_of("tiny", "cpu")
    ours, theirs, grouped = (bench_transformers.step(model, tokens) for model in models.values())
    for a, b, c in zip(ours, theirs, grouped, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)


def test_memory_of_the_loss_is_seen(monkeypatch):
    wide = tiny("LlamaConfig", intermediate_size=16)
    wide[1]["vocab_size"] = 8192
    monkeypatch.setattr(bench_transformers, "CASES", {"wide": (*wide[:3], (2, 256), (1, 8))})
    ours, eager = bench_transformers.measure("wide", torch.float32, "cpu", rounds=3)
    assert ours["peak MiB"] < 0.6 * eager["peak MiB"]
