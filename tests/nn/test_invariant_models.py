"""Log-probabilities of a model in batch-invariant mode: the same bits however tokens are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import full

from fastmp.apps.generation import generate
from fastmp.config import LatentConfig
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.documents import Documents
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.objectives import token_log_probs
from fastmp.ops import batch_invariant
from fastmp.testing.ranks import run_ranks
from tools.small_models import EXPERTS, QWEN, SMALL, make_gpt

GROUPED = {"score": "sigmoid", "normalize_topk": True, "expert_bias": True, "num_groups": 2, "group_topk": 1}
CONFIGS = {
    "learned": SMALL,
    "experts": EXPERTS,
    "window": replace(QWEN, sliding_window=4),
    "grouped": replace(EXPERTS, moe=replace(EXPERTS.moe, **GROUPED)),
    "sinks": replace(QWEN, attention_sinks=True),
    "latent": replace(
        QWEN, qk_norm=False, head_size=None, num_kv_heads=None, latent=LatentConfig(kv_rank=16, q_rank=16)
    ),
}
DTYPES = [torch.float32, *full([torch.bfloat16])]
TOKENS = torch.randint(131, (4, 16), generator=torch.Generator().manual_seed(0))


def model_of(name, dtype=torch.float32, groups=ParallelGroups.alone(), **options):
    return make_gpt(replace(CONFIGS[name], init_std=0.3), groups, dtype, **options).eval()


def log_probs(model, hidden, ids):
    return token_log_probs(
        model.final_norm(hidden), model.output_weight, ids, torch.ones_like(ids, dtype=torch.bool),
        sequence_first=True, group=model.group, sequence_parallel=model.sequence_parallel,
        vocab_size=model.config.vocab_size,
    )  # fmt: skip


def whole(model, tokens, documents=None):
    """Log-probabilities (B, S - 1) of full sequences."""
    return log_probs(model, model.hidden(tokens[:, :-1], documents), tokens[:, 1:])


def cached(model, tokens, prompt):
    """The same, a prompt at once and then one token at a time."""
    cache, found = KeyValueCache(20), []
    for start in (0, *range(prompt, tokens.shape[1] - 1)):
        end = start + 1 if start else prompt
        if start:
            cache.follow(torch.full((len(tokens),), start), end)
        hidden = model.layers(model.embed(tokens[:, start:end], cache=cache), cache=cache)[0]
        found.append(log_probs(model, hidden, tokens[:, start + 1 : end + 1]))
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["learned", "experts", *full(["window", "grouped", "sinks", "latent"])])
def test_a_token_depends_on_its_sequence_alone(name, dtype):
    model = model_of(name, dtype)
    with torch.no_grad(), batch_invariant():
        want = whole(model, TOKENS)
        assert torch.equal(torch.cat([whole(model, row[None]) for row in TOKENS]), want)
        assert torch.equal(whole(model, TOKENS[[2, 0, 2]]), want[[2, 0, 2]])
        padded = torch.cat((TOKENS[:, :9], torch.full((4, 7), 130)), 1)
        assert torch.equal(whole(model, padded)[:, :8], want[:, :8])
        assert torch.equal(whole(model, TOKENS[:, :5]), want[:, :4])
        for prompt in (3, 11):
            assert torch.equal(cached(model, TOKENS, prompt), want)
        packed = torch.cat((TOKENS[1, :7], TOKENS[3, :9]))[None]
        documents = Documents.from_position_ids(torch.tensor([[*range(7), *range(8)]]))
        found = whole(model, packed, documents)[0]
        assert torch.equal(found[:6], want[1, :6]) and torch.equal(found[7:], want[3, :8])
    plain = whole(model, TOKENS)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.2}
    torch.testing.assert_close(plain, want, **tolerance)


def of_ranks(rank, world, name, dtype, options):
    """Log-probabilities without and with gradients, generated tokens, and the norm of a gradient."""
    groups = ParallelGroups.alone()
    if world > 1:
        experts = {"ep": world, "etp": 1} if CONFIGS[name].moe else {}
        groups = ParallelGroups.create(RankGrid(world_size=world, tp=world, **experts))
    model, ids = model_of(name, dtype, groups, **options), []
    with batch_invariant():
        with torch.no_grad():
            found = [whole(model, TOKENS[:, :-3]).tolist()]
        if not options:
            rows = generate(model, [[5, 9, 2], [11]], max_new_tokens=5, temperature=0.0, groups=groups).rows
            ids = [row.ids for row in rows]
        loss = whole(model, TOKENS[:, :-3])
    loss.sum().backward()
    norm = model.layers[0].attention.proj.weight.grad.double().square().sum()
    if world > 1:
        torch.distributed.all_reduce(norm)
    return [*found, loss.tolist()], ids, norm.item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "world", "options"),
    [
        ("experts", 2, {}),
        *full(
            [
                ("learned", 4, {"sequence_parallel": True}),
                ("window", 4, {}),
                ("experts", 4, {}),
                ("experts", 2, {"sequence_parallel": True}),
                ("latent", 2, {}),
                ("sinks", 4, {"sequence_parallel": True}),
            ]
        ),
    ],
)
def test_tensor_parallelism_changes_no_bit(name, world, options, dtype):
    log_probs_of_one, ids, norm = of_ranks(0, 1, name, dtype, {})
    assert log_probs_of_one[0] == log_probs_of_one[1]
    for found, found_ids, found_norm in run_ranks(of_ranks, world, name, dtype, options):
        assert found == log_probs_of_one
        assert not found_ids or found_ids == ids
        assert found_norm == pytest.approx(norm, rel=1e-4 if dtype == torch.float32 else 0.1)


def test_gradients_are_those_outside_the_mode():
    model, grads = model_of("experts"), []
    for mode in (batch_invariant(), torch.enable_grad()):
        model.zero_grad()
        with mode:
            whole(model, TOKENS).sum().backward()
        grads.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
