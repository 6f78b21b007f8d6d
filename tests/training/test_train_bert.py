"""Training a BERT: the same numbers on every layout and in graphs, what a step minimises, the command."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import full
from train_tools import arguments
from trainer_tools import make_groups

from fastmp.apps.generation.trained_models import load_model
from fastmp.apps.train import main
from fastmp.config import (
    BertConfig,
    DataConfig,
    GPTConfig,
    GraphConfig,
    MaskedLMConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.plan.layout import problems
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import bert_and_loss
from fastmp.training.metrics import read_metrics
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

PRE = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    vocab_size=131,
    max_seq_len=16,
    init_std=0.1,
    activation="gelu",
    bert=BertConfig(),
)
CONFIGS = {"pre": PRE, "post": replace(PRE, bert=BertConfig(post_norm=True))}
MAX_MASKED = 5  # of a sample
ALONE, ONE = ParallelGroups.alone(), ParallelConfig()


class Samples:
    """Rows of 16 tokens, of several lengths, each a function of its number; up to MAX_MASKED are masked."""

    micro_batch_size = 4

    def sample(self, number):
        generator = torch.Generator().manual_seed(number)
        length, places = 16 - number % 3 * 4, torch.arange(16)
        tokens = torch.randint(3, 131, (16,), generator=generator)
        masked = torch.zeros(16, dtype=torch.bool)
        masked[torch.randperm(length, generator=generator)[: 2 + number % 4]] = True
        return {
            "tokens": tokens.masked_fill(masked, 1).masked_fill(places >= length, 0),
            "targets": tokens.masked_fill(~masked, -100),
            "token_types": (places >= length // 2).long(),
            "padding_mask": places >= length,
            "sentence_order": torch.tensor(number % 2),
        }

    def rows(self, first):
        rows = [self.sample(number) for number in range(first, first + self.micro_batch_size)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def batch(self, step, microbatch, num_microbatches, dp_rank, dp_size):
        slot = (step * num_microbatches + microbatch) * dp_size + dp_rank
        return self.rows(slot * self.micro_batch_size)

    def validation_batches(self, dp_rank=0, dp_size=1, *, max_batches=None):
        for number in range(2 // dp_size):
            yield self.rows(10_000 + (number * dp_size + dp_rank) * self.micro_batch_size)


def train(config, groups=ALONE, layout=ONE, graphs=None, steps=5, static=False):
    """Losses and gradient norms of some steps, the loss of an evaluation, and the trainer."""
    rng = RngTracker(3, tp_rank=group_rank(groups.tp))
    options = {"max_masked": 4 * MAX_MASKED, "static_shapes": static}
    model, loss = bert_and_loss(config, groups, layout, **options, rng=rng, dtype=torch.float64)
    recipe = TrainConfig(steps=40, global_batch_size=16, eval_interval=0)
    trainer = Trainer(model, Samples(), loss, recipe, groups=groups, rng=rng, graphs=graphs)
    results = [trainer.train_step() for _ in range(steps)]
    seen = [number for result in results for number in (result.loss, result.grad_norm)]
    seen.append(torch.tensor(trainer.evaluate().loss, dtype=torch.float64))
    return [each.detach().double() for each in seen], trainer


def check_layout(rank, world, name, expected, options):
    layout = ParallelConfig(**options)
    found, trainer = train(CONFIGS[name], make_groups(world, layout), layout)
    trainer.close()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "world", "options"),
    [
        ("pre", 2, {"pp": 2, "vpp": 2}),
        *full(
            [
                ("post", 2, {"tp": 2, "sequence_parallel": True}),
                ("pre", 4, {"tp": 2, "pp": 2, "schedule": "zero_bubble", "recompute": True}),
                ("pre", 2, {}),
                ("post", 2, {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"}),
            ]
        ),
    ],
    ids=str,
)
def test_every_layout_trains_alike(name, world, options):
    expected, trainer = train(CONFIGS[name])
    trainer.close()
    run_ranks(check_layout, world, name, expected, options)


@pytest.mark.full
@pytest.mark.parametrize("scope", [None, ("full",)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_replay_what_eager_steps_compute(name, scope):
    config = replace(CONFIGS[name], dropout=0.1)
    graphs = GraphConfig(enabled=True, scope=scope, verify_every=4)
    options = {"steps": 6, "static": True}
    graphed, trainer = train(config, graphs=graphs, **options)
    eager, _ = train(config, **options)
    assert trainer.graphs.num_graphs >= 2
    assert all(map(torch.equal, graphed, eager))
    trainer.close()


def test_a_step_minimises_the_mean_of_both_losses():
    model, loss = bert_and_loss(PRE, ALONE, ONE, rng=RngTracker(3), dtype=torch.float64)
    batch = Samples().rows(0)
    total, number = loss(model, batch)
    losses = model.loss(
        batch["tokens"], batch["targets"], token_types_BS=batch["token_types"],
        padding_BS=batch["padding_mask"], sentence_order_B=batch["sentence_order"],
    )  # fmt: skip
    assert number == (batch["targets"] != -100).sum()
    weight = (batch["targets"] != -100).sum(1).double() / number
    expected = losses.masked.sum() / number + (losses.sentence * weight).sum()
    torch.testing.assert_close(total / number, expected, rtol=1e-12, atol=0)
    halves = [
        loss(model, {name: tensor[part] for name, tensor in batch.items()})
        for part in (slice(2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(half for half, _ in halves), total, rtol=1e-12, atol=0)
    model.eval()
    alone, _ = loss(model, batch)
    torch.testing.assert_close(alone, losses.masked.sum(), rtol=1e-12, atol=0)
    without = {**batch, "sentence_order": torch.full((4,), -100)}  # rows that fill a batch
    model.train()
    torch.testing.assert_close(loss(model, without)[0], alone, rtol=1e-12, atol=0)


def test_problems_of_an_encoder_are_named_beforehand():
    masked = DataConfig(seq_len=16, masked_lm=MaskedLMConfig())
    recipe = Recipe(model=PRE, data=masked)
    assert problems(recipe, 1) == []
    types = replace(PRE, bert=BertConfig(num_token_types=1))
    for wrong, message in (
        (
            {"parallel": ParallelConfig(cp=2)},
            "cp 2 would divide the sequence, of which a token",
        ),
        ({"data": replace(masked, masked_lm=None)}, "model.bert is given, but data.masked_lm is absent"),
        ({"model": replace(PRE, bert=None)}, "data.masked_lm is given, but model.bert is absent"),
        ({"model": types}, "num_token_types is 1, but a sample has two parts"),
    ):
        found = problems(replace(recipe, **wrong), None)
        assert any(message in str(each) for each in found), found


def test_an_encoder_writes_no_text():
    with pytest.raises(ValueError, match="got a BERT, which predicts masked tokens"):
        load_model(None, PRE, ALONE)


@pytest.mark.full
def test_the_command_trains_and_says_the_perplexity(tmp_path, tokens, capsys):
    bert = {"model.bert.num-token-types": 2, "data.masked-lm.mask-fraction": 0.2}
    options = {key.replace(".", "__"): value for key, value in bert.items()}
    assert main(arguments(tmp_path, tokens, **options)) == 0
    out = capsys.readouterr().out
    assert "nats per masked token, a perplexity of" in out and "a sample" not in out
    kinds = [record["kind"] for record in read_metrics(tmp_path / "tiny" / "metrics.jsonl")]
    assert {"train", "eval"} <= set(kinds)
