"""The benchmark of accelerated models measures every rival with the same weights."""

from __future__ import annotations

import argparse
import os

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks import bench_transformers, bench_transformers_ranks
from fastmp.testing.ranks import run_ranks

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
