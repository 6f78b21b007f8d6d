"""`Bert` with post_norm equals transformers' BertForPreTraining: BertForMaskedLM with one more head."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from bert_reference import POST, full_weights, make_bert, sample  # noqa: E402
from nn_tools import sum_partial_gradients, tp_groups  # noqa: E402

from fastmp.distributed.collectives import gather_from_group  # noqa: E402
from fastmp.testing.ranks import run_ranks  # noqa: E402
from tools.small_models import part_of  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
LAYER = {
    "attention.output.dense": "attention.proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
OTHERS = {
    "bert.embeddings.word_embeddings.weight": "word_embedding.weight",
    "bert.embeddings.position_embeddings.weight": "position_embedding.weight",
    "bert.embeddings.token_type_embeddings.weight": "token_type_embedding.weight",
    "bert.embeddings.LayerNorm": "embedding_norm",
    "bert.pooler.dense": "sentence_head.pooler",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.norm",
    "cls.seq_relationship": "sentence_head.order",
    "cls.predictions.bias": "lm_head.bias",
}


def places(theirs, grads=False):
    """{our name: their tensors}: three for the fused projection, whose rows are grouped by head."""
    found = {}
    for name, param in theirs.named_parameters():
        tensor, stem, kind = param.grad if grads else param, *name.rpartition(".")[::2]
        if name in OTHERS or stem in OTHERS:
            found[OTHERS.get(name) or f"{OTHERS[stem]}.{kind}"] = [tensor]
            continue
        layer, part = stem.removeprefix("bert.encoder.layer.").split(".", 1)
        if part.startswith("attention.self."):
            found.setdefault(f"layers.{layer}.attention.qkv.{kind}", []).append(tensor)
        else:
            found[f"layers.{layer}.{LAYER[part]}.{kind}"] = [tensor]
    return found


def fused(tensors):
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([tensor.unflatten(0, (POST.num_heads, -1)) for tensor in tensors], 1).flatten(0, 2)


def their_model():
    """BertForPreTraining in float64 with weights of the tests' seed."""
    made = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=POST.vocab_size, hidden_size=POST.hidden_size, num_hidden_layers=POST.num_layers,
            num_attention_heads=POST.num_heads, intermediate_size=POST.ffn_size, max_position_embeddings=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            pad_token_id=None,  # whose row has no gradient there, also where it is no padding
        )
    ).double()  # fmt: skip
    weights = full_weights(POST)
    with torch.no_grad():
        for name, tensors in places(made).items():
            rows = weights[name].detach()
            if len(tensors) == 3:
                rows = rows.unflatten(0, (POST.num_heads, 3, -1))
                rows = [rows[:, i].flatten(0, 1) for i in range(3)]
            for tensor, own in zip(tensors, rows if len(tensors) == 3 else [rows], strict=True):
                tensor.copy_(own)
    assert {*places(made)} == {*weights}
    return made


def our_model(weights, groups, **options):
    model = make_bert(POST, groups, **options)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(part_of(weights[name], param, groups))
    return model


def their_output(model, given):
    return model(
        input_ids=given.tokens, attention_mask=(~given.padding).long(), token_type_ids=given.types,
        labels=given.targets, next_sentence_label=given.order,
    )  # fmt: skip


def our_loss(model, given):
    """The mean of masked tokens plus the mean of the order of sentences."""
    losses = model.loss(
        given.tokens, given.targets, token_types_BS=given.types, padding_BS=given.padding,
        sentence_order_B=given.order, max_masked=20,
    )  # fmt: skip
    return losses.masked.sum() / (given.targets != -100).sum() + losses.sentence.mean()


def compare(weights, grads, given, logits_BSV, order_B2, loss, tp, sequence_parallel):
    groups = tp_groups(tp)
    model = our_model(weights, groups, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        logits_SBV = gather_from_group(model(given.tokens, given.types, given.padding), model.group)
        gathered = model.gathered(model.hidden(given.tokens, given.types, given.padding))
        torch.testing.assert_close(model.sentence_logits(gathered), order_B2, **CLOSE)
    ours = logits_SBV[..., : POST.vocab_size].transpose(0, 1)[~given.padding]
    torch.testing.assert_close(ours, logits_BSV[~given.padding], **CLOSE)
    own = our_loss(model, given)
    torch.testing.assert_close(own, loss, **CLOSE)
    own.backward()
    sum_partial_gradients(model.parameters(), model.group)
    for name, param in model.named_parameters():
        expected = part_of(grads[name], param, groups)
        torch.testing.assert_close(
            param.grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
        )


@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, True), (4, False)])
def test_logits_losses_and_gradients(tp, sequence_parallel):
    theirs, given = their_model(), sample(POST)
    output = their_output(theirs, given)
    output.loss.backward()
    weights = {name: fused(tensors).detach() for name, tensors in places(theirs).items()}
    grads = {name: fused(tensors) for name, tensors in places(theirs, grads=True).items()}
    found = output.prediction_logits.detach(), output.seq_relationship_logits.detach(), output.loss.detach()
    run_ranks(lambda rank, world: compare(weights, grads, given, *found, tp, sequence_parallel), tp)


def test_forty_steps_of_adamw():
    theirs = their_model()
    weights = {name: fused(tensors).detach() for name, tensors in places(theirs).items()}
    ours = our_model(weights, tp_groups(1))
    options = {"lr": 3e-3, "weight_decay": 0.01}
    optimizers = [torch.optim.AdamW(model.parameters(), **options) for model in (ours, theirs)]
    first = None
    for step in range(40):
        given, losses = sample(POST, seed=step % 4), []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = our_loss(model, given) if model is ours else their_output(model, given).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, **CLOSE, msg=lambda text, step=step: f"{step}: {text}")
        first = losses[0] if first is None else first
    assert losses[0] < 0.5 * first
