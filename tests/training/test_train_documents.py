"""Training on packed documents: on every layout what each document alone gives, and by the command."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphed_trainers import run_packed
from marks import exhaustive, full
from torch._subclasses.fake_tensor import FakeTensorMode
from train_tools import DENSE, EXPERTS, NoDeviceCopies, PackedSamples, arguments, gather_main_grads, losses
from trainer_tools import case, make_groups, make_trainer, whole

from fastmp.apps.train import main
from fastmp.config import GraphConfig, ParallelConfig, TrainConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from fastmp.training.data.corpus import build
from fastmp.training.language import gpt_and_loss
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LLAMA = replace(DENSE, position="rope", norm="rmsnorm", tie_embeddings=False, num_kv_heads=2)
# A load-balancing loss is one of all tokens together: without it, experts see documents one by one as well.
MOE = replace(EXPERTS, position="rope", moe=replace(EXPERTS.moe, aux_loss=0.0))


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


def packed(groups, layout, config):
    trainer = make_trainer(groups, layout, config=config, samples=PackedSamples)
    result = trainer.train_step()
    gather_main_grads(trainer.grads)
    grads = whole(trainer, lambda param: param.main_grad)
    return result.loss, grads, trainer.evaluate().loss


CASES = {
    2: [case(MOE, pp=2, vpp=2, schedule="zero_bubble", recompute=True)],
    4: [
        case(LLAMA, pp=2, vpp=2, tp=2, sequence_parallel=True),
        case(DENSE, pp=4),
        case(DENSE, cp=2, pp=2),
        case(MOE, ep=2, pp=2, schedule="zero_bubble"),
        case(MOE, cp=2, ep=2, tp=2, etp=1),
        case(LLAMA, pp=2, stage_layers=(0, 4)),
        case(MOE, pp=2, vpp=2, ep=2, schedule="dualpipe_v"),
    ],
}


@pytest.mark.parametrize("world", [*full([2]), *exhaustive([4])])
def test_every_layout_trains_on_each_document_alone(world):
    def rank_main(rank, world_size):
        return [packed(make_groups(world_size, layout), layout, config) for config, layout in CASES[world]]

    results = run_ranks(rank_main, world, timeout=180)
    for number, (config, layout) in enumerate(CASES[world]):
        expected, expected_grads = alone(config)
        evaluated, seen = packed_on_one_rank(config), set()
        for loss, grads, evaluation in (own[number] for own in results):
            torch.testing.assert_close(loss, expected, **CLOSE)
            assert abs(evaluation - evaluated) < 1e-10
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected_grads[name], msg=f"{layout}: {name}", **CLOSE)
            seen |= set(grads)
        assert seen == set(expected_grads), layout


def packed_on_one_rank(config):
    trainer = make_trainer(config=config, samples=PackedSamples)
    trainer.train_step()
    return trainer.evaluate().loss


def graphs_case(rank, world, cases):
    for config, layout, scope in cases:
        groups = make_groups(world, layout)
        graphs = GraphConfig(enabled=True, scope=scope, verify_every=5)
        (graphed, manager), (eager, _) = (run_packed(groups, layout, config, each) for each in (graphs, None))
        assert manager.num_graphs == manager.plan.num_graphs, manager.describe()
        assert all(map(torch.equal, graphed, eager)), (layout, scope)


GRAPHS = {
    1: [
        (*case(MOE), None),
        (*case(LLAMA, recompute=True), None),
        (*case(replace(LLAMA, attention_dropout=0.1)), None),
        (*case(MOE), ("moe_router",)),
        (*case(MOE, recompute=True), ("full",)),
    ],
    2: [
        (*case(LLAMA, pp=2, vpp=2), None),
        (*case(MOE, pp=2, schedule="zero_bubble", recompute=True), None),
        (*case(DENSE, pp=2, stage_layers=(0, 4)), ("full",)),
        (*case(MOE, cp=2, ep=2), None),
        (*case(MOE, tp=2, sequence_parallel=True), ("full",)),
    ],
}


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, GRAPHS[1][:1]),
        *full([(1, GRAPHS[1][1:])]),
        *exhaustive([(2, GRAPHS[2])]),
    ],
)
def test_graphs_read_where_documents_of_each_microbatch_begin(world, cases):
    """Bit for bit what eager steps make of them; they differ from microbatch to microbatch."""
    graphs_case(0, 1, cases) if world == 1 else run_ranks(graphs_case, world, cases, timeout=180)


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
