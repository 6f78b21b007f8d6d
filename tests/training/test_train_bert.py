"""Training a BERT: what a step minimises, recipes that do not fit, the command."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from train_tools import PRE, BertSamples, arguments

from fastmp.apps.generation.trained_models import load_model
from fastmp.apps.train import main
from fastmp.config import (
    BertConfig,
    DataConfig,
    MaskedLMConfig,
    ParallelConfig,
    Recipe,
)
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.plan.layout import problems
from fastmp.training.language import bert_and_loss
from fastmp.training.metrics import read_metrics

ALONE = ParallelGroups.alone()
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_step_minimises_the_mean_of_both_losses():
    model, loss = bert_and_loss(PRE, ALONE, ParallelConfig(), rng=RngTracker(3), dtype=torch.float64)
    batch = BertSamples(4).samples(0)
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
