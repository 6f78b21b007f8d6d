"""Training on packed documents: what each document alone gives, and by the command."""

from __future__ import annotations

import pytest
import torch
from feature_table import DENSE, LLAMA, MOE
from graphed_trainers import run_packed
from marks import full
from torch._subclasses.fake_tensor import FakeTensorMode
from train_tools import NoDeviceCopies, PackedSamples, arguments, losses
from trainer_tools import make_trainer, whole

from fastmp.apps.train import main
from fastmp.config import GraphConfig, ParallelConfig, TrainConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.training.data.corpus import build
from fastmp.training.language import gpt_and_loss
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def alone(config):
    """Loss per token and all gradients of a step, each document in a batch of its own."""
    trainer = make_trainer(config=config, samples=PackedSamples)
    trainer.grads.zero()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for number in range(trainer.config.global_batch_size):
        first = 0
        for length in trainer.data.lengths(number):
            ids, targets = (x[None, first : first + length] for x in trainer.data.sample(number))
            loss = trainer.model.loss(ids, targets, ignore_index=-100)
            of_tokens, aux = (loss, 0.0) if config.moe is None else (loss.tokens, loss.aux)
            (of_tokens.sum() + aux).backward()
            total, tokens, first = (
                total + of_tokens.detach().sum(),
                tokens + targets.ne(-100).sum(),
                first + length,
            )
    trainer.grads.reduce()
    return total / tokens, whole(trainer, lambda param: param.main_grad)


@pytest.mark.parametrize("config", [LLAMA, *full([MOE, DENSE])], ids=("llama", "moe", "dense"))
def test_a_step_trains_on_each_document_alone(config):
    """On one rank; tests/training/test_every_layout.py compares the layouts with it."""
    trainer = make_trainer(config=config, samples=PackedSamples)
    loss = trainer.train_step().loss
    expected, expected_grads = alone(config)
    torch.testing.assert_close(loss, expected, **CLOSE)
    grads = whole(trainer, lambda param: param.main_grad)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], msg=name, **CLOSE)


@pytest.mark.full
def test_documents_without_room_for_more_run_eagerly_where_their_number_differs():
    (graphed, _), (eager, _) = (
        run_packed(ParallelGroups.alone(), None, LLAMA, graphs, None)
        for graphs in (GraphConfig(enabled=True), None)
    )
    torch.testing.assert_close(graphed, eager, **CLOSE)


@pytest.mark.full
@pytest.mark.parametrize("max_documents", [None, 12])
@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(vpp=2, schedule="zero_bubble")])
def test_a_step_copies_nothing_to_the_host(layout, max_documents):
    """On the meta device, where reading a value raises; batches are made before, by the host."""
    data = PackedSamples(4, max_documents=max_documents)
    batches = [data.batch(0, number, 4, 0, 1) for number in range(4)]
    data.batch = lambda step, microbatch, *of: batches[microbatch]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, loss = gpt_and_loss(MOE, ParallelGroups.alone(), layout, device="meta")
        trainer = Trainer(model, data, loss, TrainConfig(global_batch_size=16))
        with NoDeviceCopies():
            assert trainer.train_step().loss.device.type == "meta"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Token files of 60 documents of 10 to 80 tokens."""
    folder = tmp_path_factory.mktemp("documents")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"{i} times {i} is {i * i}.\n"[: 10 + i] * (1 + i % 4))
    return build([f"{folder}/*.txt"], folder / "tokens")


@pytest.mark.full
def test_a_run_on_documents_goes_on_bitwise(tmp_path, documents, capsys):
    def run(name, *more, **changes):
        changes = {"checkpoint.interval": 3, "model.position": "rope", "train.steps": 5} | changes
        assert main([*arguments(tmp_path, documents, name, **changes), *more]) == 0
        return losses(tmp_path / name)

    masked = ("--data.document-masking",)
    through = run("through", *masked)
    assert run("again", *masked) == through
    first = run("in-two", *masked, **{"train.steps": 3})
    assert run("in-two", *masked, "--resume", "auto") == through and first == through[:3]
    assert "resumed after step 3" in capsys.readouterr().out
    graphed = run("graphed", *masked, "--graphs")
    assert "graphs of 1 spans of segments" in capsys.readouterr().out
    assert [loss for _, loss in graphed] == pytest.approx([loss for _, loss in through], abs=1e-5)
    plain = run("plain")
    assert plain[0][1] != through[0][1] and abs(plain[0][1] - through[0][1]) < 0.1
