"""The heads of tasks: equal to those of transformers, and on every layout to those of one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from finetune_models import MODEL, OUTPUTS, PRE, make_trainer, task_data
from marks import full

from examples.megatron_paper.finetuning.losses import score_samples, task_loss
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Bert, BertForTask, Placement
from fastmp.nn.bert_tasks import pretrained_name
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
HEADS = tuple(OUTPUTS)


def run(trainer):
    """The losses and norms of three steps, and then the scores of the development set, where they are."""
    results = [trainer.train_step() for _ in range(3)]
    numbers = [(result.loss.item(), result.grad_norm.item(), result.num_tokens.item()) for result in results]
    runner, data = trainer.runner, trainer.data
    schedule = runner.functions.schedule
    scores = score_samples(runner.chunks, data, data.dev, trainer.groups, trainer.device, schedule)
    return torch.tensor(numbers, dtype=torch.float64), scores


@cache
def alone(head, config):
    """Made once in a process; ranks forked later find it."""
    return run(make_trainer(head, config))


ON_A_V = {"pp": 2, "vpp": 2, "stage_layers": (1, 0, 1, 0), "schedule": "dualpipe_v"}


def check_layout(rank, world, head, config, layout):
    numbers, scores = alone(head, config)
    ours, our_scores = run(make_trainer(head, config, **layout))
    torch.testing.assert_close(ours, numbers, **CLOSE)
    assert (our_scores is None) == (rank > 0)
    if rank == 0:
        np.testing.assert_allclose(our_scores, scores, rtol=2e-6, atol=1e-6)  # they are float32


@pytest.mark.parametrize(
    ("head", "config", "world", "layout"),
    [
        ("span", PRE, 2, {"tp": 2, "sequence_parallel": True}),
        *full(
            (head, config, world, layout)
            for head in HEADS
            for config, world, layout in (
                (MODEL, 2, {"tp": 2}),
                (MODEL, 2, {"tp": 2, "sequence_parallel": True, "recompute": True}),
                (PRE, 2, {}),
                (PRE, 2, {"pp": 2}),
                (MODEL, 1, {"vpp": 2}),
                (MODEL, 2, ON_A_V),
                (MODEL, 4, {"pp": 2, "tp": 2}),
                (PRE, 4, {"pp": 2}),
            )
        ),
    ],
    ids=lambda value: ("post" if value.bert.post_norm else "pre") if hasattr(value, "bert") else str(value),
)
def test_every_layout_trains_as_one_rank_does(head, config, world, layout):
    alone(head, config)
    run_ranks(check_layout, world, head, config, layout)


def test_the_table_of_words_is_in_the_first_stage_alone():
    def case(rank, world):
        trainer = make_trainer("classes", pp=2)
        names = [name for chunk in trainer.runner.chunks for name, _ in chunk.named_parameters()]
        assert ("word_embedding.weight" in names) == (rank == 0)
        assert ("task_head.output.weight" in names) == (rank == 1)

    run_ranks(case, 2)


def test_weights_are_drawn_as_those_of_pretraining_and_the_head_by_the_seed():
    drawn = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn[seed] = dict(BertForTask(PRE, head="classes", num_outputs=2).named_parameters())
    torch.manual_seed(1)
    pretrained = dict(Bert(PRE).named_parameters())
    for name, param in drawn[1].items():
        before = pretrained_name(name)
        assert before is None or name.startswith("task_head.") or torch.equal(param, pretrained[before]), name
    assert not torch.equal(drawn[1]["task_head.output.weight"], drawn[2]["task_head.output.weight"])
    assert pretrained_name("task_head.pooler.weight") in pretrained
    assert pretrained_name("task_head.output.weight") is None
    assert not any(name.startswith(("lm_head", "sentence_head")) for name in drawn[1])


def test_dropout_of_the_head_is_that_of_training_alone():
    config = replace(PRE, dropout=0.5)
    model = BertForTask(config, Placement(dtype=torch.float64), head="classes", num_outputs=3)
    (batch,) = task_data("classes", micro_batch_size=7).validation_batches()
    model.eval()
    first = task_loss(model, batch)[0]
    assert torch.equal(first, task_loss(model, batch)[0])
    model.train()
    assert not torch.equal(task_loss(model, batch)[0], task_loss(model, batch)[0])


@pytest.mark.parametrize("head", HEADS)
def test_padding_changes_nothing_but_the_length_of_rows(head):
    model = BertForTask(PRE, Placement(dtype=torch.float64), head=head, num_outputs=OUTPUTS[head]).eval()
    short, long = (
        next(iter(task_data(head, seq_len=seq_len, micro_batch_size=7).validation_batches()))
        for seq_len in (11, 12)
    )
    torch.testing.assert_close(task_loss(model, short)[0], task_loss(model, long)[0], **CLOSE)


def test_another_head_is_refused():
    with pytest.raises(
        ValueError, match="BertForTask: head must be one of classes, span, choices, got 'words'"
    ):
        BertForTask(PRE, head="words")


TRANSFORMERS = {
    "classes": "BertForSequenceClassification",
    "span": "BertForQuestionAnswering",
    "choices": "BertForMultipleChoice",
}


def our_weights(theirs, config):
    """The parameters of a model of transformers by our names, queries, keys and values put together."""
    found = {}
    plain = {
        "bert.embeddings.word_embeddings": "word_embedding",
        "bert.embeddings.position_embeddings": "position_embedding",
        "bert.embeddings.token_type_embeddings": "token_type_embedding",
        "bert.embeddings.LayerNorm": "embedding_norm",
        "bert.pooler.dense": "task_head.pooler",
        "classifier": "task_head.output",
        "qa_outputs": "task_head.output",
    }
    in_layer = {
        "attention.output.dense": "attention.proj",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "mlp.up",
        "output.dense": "mlp.down",
        "output.LayerNorm": "mlp_norm",
    }
    for name, tensor in theirs.items():
        module, _, kind = name.rpartition(".")
        if module in plain:
            found[f"{plain[module]}.{kind}"] = tensor
        elif "attention.self" not in module:
            _, _, _, number, part = module.split(".", 4)
            found[f"layers.{number}.{in_layer[part]}.{kind}"] = tensor
    for number in range(config.num_layers):
        for kind in ("weight", "bias"):
            at = f"bert.encoder.layer.{number}.attention.self."
            parts = [theirs[f"{at}{part}.{kind}"] for part in ("query", "key", "value")]
            heads = [part.unflatten(0, (config.num_heads, -1)) for part in parts]
            found[f"layers.{number}.attention.qkv.{kind}"] = torch.cat(heads, 1).flatten(0, 1)
    return found


@pytest.mark.parametrize("head", HEADS)
def test_equals_transformers(head):
    """Scores of padding, which mean nothing, are left out of the loss of answers here; there they are in."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = replace(MODEL, layernorm_epsilon=1e-12)
    their_config = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.ffn_size,
        max_position_embeddings=config.max_seq_len,
        num_labels=OUTPUTS[head] if head == "classes" else 2,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    torch.manual_seed(4)
    theirs = getattr(transformers, TRANSFORMERS[head])(their_config).double().eval()
    ours = BertForTask(
        config, Placement(ParallelGroups.alone(), dtype=torch.float64), head=head, num_outputs=OUTPUTS[head]
    ).eval()
    weights = our_weights(dict(theirs.named_parameters()), config)
    vocabulary = slice(config.vocab_size)
    with torch.no_grad():
        assert {name for name, _ in ours.named_parameters()} == set(weights)
        for name, param in ours.named_parameters():
            param[: len(weights[name])].copy_(weights[name])
    (batch,) = task_data(head, micro_batch_size=7).validation_batches()
    inputs = {
        "input_ids": batch["tokens"],
        "token_type_ids": batch["token_types"],
        "attention_mask": (~batch["padding_mask"]).long(),
    }
    labels = batch["labels"]
    if head == "choices":
        inputs = {name: tensor.unflatten(0, (-1, 4)) for name, tensor in inputs.items()}
    if head == "span":
        out = theirs(**inputs)
        scores = torch.stack([out.start_logits, out.end_logits], 1)
        scores = scores.masked_fill(batch["padding_mask"].unsqueeze(1), -torch.inf)
        their_loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
    else:
        their_loss = theirs(**inputs, labels=labels[:, 0]).loss
    total, number = task_loss(ours, batch)
    torch.testing.assert_close(total / number, their_loss, **CLOSE)
    (total / number).backward()
    their_loss.backward()
    grads = our_weights({name: param.grad for name, param in theirs.named_parameters()}, config)
    for name, param in ours.named_parameters():
        grad = param.grad[vocabulary] if name == "word_embedding.weight" else param.grad
        expected = grads[name].clone()
        if name == "word_embedding.weight":  # theirs has none for the id of padding
            expected[0], grad = 0, grad.clone()
            grad[0] = 0
        torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
