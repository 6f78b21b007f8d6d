"""Accelerated models of transformers in batch-invariant mode: batches, padding on the left, and caches."""

from __future__ import annotations

import pytest
import torch
from hf_models import VOCAB, model_of

import fastmp
from fastmp.ops import batch_invariant

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.full
IDS = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
FAMILIES = (
    "llama",
    "qwen3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "dots1",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_depend_on_their_sequence_alone(family):
    model = model_of(family).eval()
    fastmp.accelerate(model)
    with torch.no_grad(), batch_invariant():
        want = model(IDS).logits
        assert torch.equal(torch.cat([model(row[None]).logits for row in IDS]), want)
        assert torch.equal(model(IDS[:, :7]).logits, want[:, :7])
        padding = torch.zeros(3, 4, dtype=torch.int64)
        padded = model(
            torch.cat((padding, IDS), 1),
            attention_mask=torch.cat((padding, torch.ones_like(IDS)), 1),
            position_ids=torch.cat((padding, torch.arange(12).expand(3, 12)), 1),
        )
        assert torch.equal(padded.logits[:, 4:], want)
        out = model(IDS[:, :5], use_cache=True)
        found = [out.logits]
        for place in range(5, 12):
            out = model(IDS[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits)
        assert torch.equal(torch.cat(found, 1), want)
