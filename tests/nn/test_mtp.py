"""Multi-token prediction against a module written out by hand, and what it may and may not see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fastmp.config import GPTConfig, MoEConfig
from fastmp.nn import GPT, Documents, Placement
from fastmp.nn.gpt import GPTLosses
from fastmp.nn.mtp import FutureTokens

CONFIG = GPTConfig(
    **{"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 61, "max_seq_len": 16},
    **{"init_std": 0.1, "norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 48},
    **{"linear_bias": False, "position": "rope", "tie_embeddings": False, "mtp_depth": 2, "mtp_weight": 0.3},
)
EXPERTS = replace(CONFIG, moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=24, aux_loss=0.01))
S = 16


def make(config=CONFIG):
    torch.manual_seed(0)
    model = GPT(config, Placement(dtype=torch.float64))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # they are ones at first
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(rows=3):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (rows, S + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:].clone()


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + CONFIG.layernorm_epsilon).rsqrt() * weight


def by_hand(model, tokens, targets, config=CONFIG):
    """Return the weighted loss of each depth, one sequence and one token after another."""
    words, output = model.word_embedding.weight, model.output_weight[: config.vocab_size]
    hidden = model.hidden(tokens)
    state, losses = norm(hidden, model.final_norm.weight), []
    for k, module in enumerate(model.mtp, 1):
        ahead = torch.stack([torch.cat((row[k:], row[:k])) for row in tokens])
        inputs = (
            norm(words[ahead.t()], module.embedding_norm.weight),
            norm(state, module.hidden_norm.weight),
        )
        (layer,) = module.layers
        state = norm(layer(F.linear(torch.cat(inputs, -1), module.proj.weight)), module.final_norm.weight)
        total = 0.0
        for b, row in enumerate(targets):
            found = [
                F.cross_entropy(output @ state[i, b], row[i + k]) for i in range(S - k) if row[i + k] != -100
            ]
            if found:
                number = int((row != -100).sum())
                total = total + config.mtp_weight / config.mtp_depth * torch.stack(found).mean() * number
        losses.append(total)
    return losses


@pytest.mark.parametrize("ignored", [False, True])
def test_loss_and_gradients_are_those_by_hand(ignored):
    model, (tokens, targets) = make(), batch()
    if ignored:
        targets[0, :7] = targets[1] = -100
        targets[2, 3] = targets[2, -1] = -100
    losses = model.loss(tokens, targets, loss_grad_BS=1.0)
    assert isinstance(losses, GPTLosses) and losses.aux is None
    assert torch.equal(losses.sum(), losses.tokens.sum() + losses.mtp)
    losses.sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    want = sum(by_hand(model, tokens, targets))
    torch.testing.assert_close(losses.mtp, want, rtol=0, atol=1e-11)
    main = model.eval().loss(tokens, targets)
    assert isinstance(main, torch.Tensor) and torch.equal(main, losses.tokens)
    (main.sum() + want).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-11, msg=name)


def test_the_model_is_the_same_without_modules():
    """Also its first weights: modules draw after it."""
    model, (tokens, targets) = make(), batch()
    torch.manual_seed(0)
    plain = GPT(replace(CONFIG, mtp_depth=0), Placement(dtype=torch.float64))
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")}
    assert plain.state_dict().keys() == own.keys()
    plain.load_state_dict(own)
    assert torch.equal(plain.loss(tokens, targets), model.loss(tokens, targets).tokens)
    torch.manual_seed(0)
    drawn = GPT(CONFIG, Placement(dtype=torch.float64)).state_dict()
    torch.manual_seed(0)
    for name, value in GPT(replace(CONFIG, mtp_depth=0), Placement(dtype=torch.float64)).state_dict().items():
        assert torch.equal(value, drawn[name]), name


def test_a_document_is_a_sequence_of_its_own():
    """The modules' loss of packed documents is that of each alone, but for the mean over the row."""
    model, lengths = make(), (9, 1, 4, 2)
    tokens, _ = batch(rows=1)
    targets, starts = tokens.roll(-1, 1), torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    targets[0, torch.tensor(lengths).cumsum(0) - 1] = -100  # as documents end
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = Documents(positions, torch.tensor([*starts, S], dtype=torch.int32), max(lengths))
    packed = model.loss(tokens, targets, documents=documents)
    number = int((targets != -100).sum())
    want = 0.0
    config = replace(CONFIG, mtp_weight=1.0, mtp_depth=1)
    for k in (1, 2):
        total, count = 0.0, 0
        for start, length in zip(starts, lengths):
            part = slice(int(start), int(start) + length)
            ids, row = tokens[:, part], targets[:, part]
            future = FutureTokens.of(ids, row, replace(config, mtp_depth=2))
            states, *_ = model.predict_ahead(model.hidden(ids), future.tokens)
            goal = future.targets[k - 1]
            each = F.cross_entropy(
                (states[k - 1] @ model.output_weight[: CONFIG.vocab_size].t()).transpose(0, 1).flatten(0, 1),
                goal.flatten(),
                reduction="sum",
            )
            inside = int((goal != -100).sum())
            total, count = total + (each if inside else 0.0), count + inside
        want += CONFIG.mtp_weight / 2 * total / count * number
    torch.testing.assert_close(packed.mtp, want, rtol=0, atol=1e-11)


def test_a_prediction_sees_no_later_token():
    """The state of depth k at place i depends on tokens up to i + k: those before its target."""
    model, (tokens, targets) = make(), batch(rows=1)
    future = FutureTokens.of(tokens, targets, CONFIG)

    def states(ids):
        future = FutureTokens.of(ids, targets, CONFIG)
        return model.predict_ahead(model.hidden(ids), future.tokens)[0]

    before = states(tokens)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % CONFIG.vocab_size
    for k, (old, new) in enumerate(zip(before, states(changed)), 1):
        different = (old != new).any(-1)[:, 0]
        assert not different[: 9 - k].any() and different[9 - k : S - k].all(), k
    assert future.tokens.shape == future.targets.shape == (2, 1, S)


def test_experts_of_modules_count():
    model, (tokens, targets) = make(EXPERTS), batch()
    losses = model.loss(tokens, targets)
    assert losses.counts.shape == (4, 4) and (losses.counts.sum(1) == tokens.numel() * 2).all()
    plain = make(replace(EXPERTS, mtp_depth=0)).loss(tokens, targets)
    assert losses.aux > plain.aux
    assert model.eval().loss(tokens, targets).counts.shape == (2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": "learned"}, "mtp_depth needs position \"rope\", got 'learned'"),
        ({"mtp_depth": -1}, "mtp_depth must not be negative, got -1"),
        ({"mtp_weight": -0.5}, "mtp_weight must not be negative, got -0.5"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **options)


def test_future_of_another_batch_or_depth():
    model, (tokens, targets) = make(), batch()
    for future in (
        FutureTokens.of(tokens[:, :8], targets[:, :8], CONFIG),
        FutureTokens.of(tokens, targets, replace(CONFIG, mtp_depth=1)),
    ):
        with pytest.raises(ValueError, match=r"expected future tokens, .*\(2, 3, 16\).*, got .*; make"):
            model.loss(tokens, targets, future=future)


def test_weights_of_tokens_are_those_of_the_same_targets():
    """A target of weight 0, such as one of a prompt, trains no module either."""
    model, (tokens, targets) = make(), batch()
    targets[:, 10:] = -100
    weight = torch.zeros(targets.shape, dtype=torch.float64)
    assert model.loss(tokens, targets, token_weight_BS=weight).mtp == 0
    weight[:, 9] = 2.0
    found = model.loss(tokens, targets, token_weight_BS=weight).mtp
    want = model.loss(tokens, targets.masked_fill(weight == 0, -100)).mtp
    # a mean over one target, for one target of the model, in place of 10 / (10 - k) for each
    future = FutureTokens.of(tokens, targets, CONFIG, token_weight_BS=weight)
    assert future.weights.shape == (2, 3, S) and future.cut(None).weights.shape == (2, 3, S)
    states, *_ = model.predict_ahead(model.hidden(tokens), future.tokens)
    by_depth = [
        model.mtp_loss([state], FutureTokens(*(x[k : k + 1] for x in future)))
        for k, state in enumerate(states)
    ]
    torch.testing.assert_close(found, sum(by_depth), rtol=0, atol=1e-11)
    plain = sum(loss / 2 * (9 - k) / 10 for k, loss in enumerate(by_depth))
    torch.testing.assert_close(plain, want, rtol=0, atol=1e-11)
