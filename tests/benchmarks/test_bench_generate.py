"""The benchmark of generating measures every rival with the same weights and tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks import bench_generate

pytestmark = pytest.mark.full


def test_every_rival_has_a_row_and_makes_the_same_tokens(monkeypatch):
    sizes = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {**sizes, "num_key_value_heads": 2, "intermediate_size": 48}
    monkeypatch.setattr(bench_generate, "CASES", {"tiny": ("LlamaConfig", options, {})})
    monkeypatch.setattr(bench_generate, "NEW", 5)
    rows = bench_generate.measure("tiny", torch.float32, 2, "cpu", rounds=3)
    assert [row["by"] for row in rows] == ["fastmp", "dynamic cache", "static cache"]
    assert rows[1]["prefill to dynamic"] == rows[1]["decode to dynamic"] == 1
    assert all(row["decode tokens/s"] > 0 and row["of floor"] > 0 for row in rows)

    _, ours = bench_generate.models_of("tiny", torch.float32, "cpu")
    weights = sum(p.nbytes for n, p in ours.named_parameters() if not n.startswith("word_embedding"))
    caches = 2 * 2 * 2 * 8 * (bench_generate.PROMPT + 2) * 4  # keys and values, of two layers, two heads of 8
    assert bench_generate.bytes_of_a_step(ours, 3) == weights + 3 * (caches + 32 * 4)


def test_tokens_that_differ_are_an_error(monkeypatch):
    runs = {"fastmp": lambda new: [[1] * new], "dynamic cache": lambda new: [[2] * new]}
    monkeypatch.setattr(bench_generate, "runs_of", lambda *given: runs)
    monkeypatch.setattr(bench_generate, "models_of", lambda *given: (None, None))
    with pytest.raises(RuntimeError, match="rivals make other tokens"):
        bench_generate.measure("tiny", torch.float32, 1, "cpu", rounds=3)
