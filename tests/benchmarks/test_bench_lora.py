"""The benchmark of LoRA measures every rival with the same weights and adapters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from benchmarks import bench_lora

pytestmark = pytest.mark.full


def test_every_rival_has_a_row_and_the_same_gradients(monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 8}
    monkeypatch.setitem(bench_lora.CASES, "tiny", ("Qwen3MoeConfig", sizes, {}, (1, 8), (1, 8)))
    rows = bench_lora.measure("tiny", torch.float32, "cpu", rounds=3)
    assert [row["by"] for row in rows] == ["fastmp", "eager", "grouped_mm"]
    assert rows[2]["of grouped_mm"] == 1 and all(row["ms"] > 0 for row in rows)
    models, tokens = bench_lora.models_of("tiny", torch.float32, "cpu"), bench_lora.tokens_of("tiny", "cpu")
    ours, *others = ([g.clone() for g in bench_lora.step(model, tokens)] for model in models.values())
    assert len(ours) == 12
    for other in others:
        torch.testing.assert_close(ours, other)
