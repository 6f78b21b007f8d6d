"""Parameters of experts in training, by a stand-in: collectives, norm, skipped steps, checkpoints, loads."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from expert_stand_in import GLOBAL_BATCH, E, loss_fn, make_trainer, stats_loss_fn
from feature_table import one_rank
from marks import full
from train_tools import saved_tensors
from trainer_tools import make_groups

from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks
from fastmp.training.metrics import RunInfo, TrainLog, read_metrics
from fastmp.training.plot import plot_loads

pytestmark = pytest.mark.usefixtures("one_thread")


def test_one_rank_is_plain_autograd():
    """What the layouts are compared with: the norm is that of all gradients, and clipping matters."""
    curve, _, grads, *_ = one_rank("stand-in")
    (loss, *_, norm), *rest = curve
    assert norm > 2.0 and rest[-1][0] < loss
    expected = math.sqrt(sum(grad.square().sum().item() for grad in grads.values())) / GLOBAL_BATCH
    assert abs(norm - expected) < 1e-10


def test_experts_and_the_rest_are_each_sent_once_to_their_own_replicas():
    def rank_main(rank, world_size):
        groups = make_groups(world_size, tp=2, ep=2, etp=1)  # dp 2, edp 2: other pairs of ranks
        trainer = make_trainer(groups)
        with count_collectives() as seen:
            trainer.grads.reduce()
        sizes = {(f.plan.experts, f.plan.partial): f.layout.size for f in trainer.grads.flats}
        return seen.calls, sizes

    for calls, sizes in run_ranks(rank_main, 4):
        experts, dense, gate = sizes[True, False], sizes[False, False], sizes[False, True]
        scattered = [("reduce_scatter", [(size // 2,), (size,)]) for size in (experts, dense, gate)]
        assert calls == [*scattered[:2], ("all_reduce", [(gate,)]), scattered[2]]


def test_the_norm_is_one_collective():
    def rank_main(rank, world_size):
        counts = []
        for tp, ep, etp in ((2, 2, 1), (2, 1, 2), (1, 1, 1), (4, 2, 1)):
            groups = make_groups(world_size, tp=tp, ep=ep, etp=etp)
            trainer = make_trainer(groups)
            with count_collectives() as seen:
                trainer.train_step()
            counts.append(len([shapes for _, shapes in seen.calls if shapes in ([()], [(1,)])]))
        return counts

    assert run_ranks(rank_main, 4) == [[1, 1, 1, 1]] * 4


def test_vectors_of_experts_are_not_decayed():
    trainer = make_trainer()
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.fill_(1.0)
    trainer.grads.zero()
    trainer.optimizer.step(0.5)
    for name, param in trainer.model.named_parameters():
        decayed = not name.endswith(("bias", "scale"))
        assert param.unique().tolist() == [0.95 if decayed else 1.0], name


def test_replicas_of_experts_start_equal_even_if_made_from_different_seeds():
    def rank_main(rank, world_size):
        trainer = make_trainer(make_groups(world_size, tp=2, ep=2, etp=1), seed=rank)
        return trainer.model.experts.up.detach(), trainer.model.up.weight.detach()

    experts, dense = zip(*run_ranks(rank_main, 4))
    assert torch.equal(experts[0], experts[2]) and torch.equal(experts[1], experts[3])
    assert not torch.equal(experts[0], experts[1])
    assert torch.equal(dense[0], dense[2]) and torch.equal(dense[1], dense[3])


@pytest.mark.parametrize("name", ["experts.up", *full(["experts.bias", "gate", "up.weight"])])
def test_one_value_that_is_not_finite_skips_the_step_everywhere(name):
    def rank_main(rank, world_size):
        trainer = make_trainer(make_groups(world_size, tp=2, ep=2, etp=1), clip=1.0)
        trainer.train_step()
        victims = [0]
        before = {key: tensor.detach().clone() for key, tensor in saved_tensors(trainer).items()}

        def poisoned(model, batch):
            if rank == victims[0]:
                dict(model.named_parameters())[name].main_grad.view(-1)[3] = math.inf
            return loss_fn(model, batch)

        trainer.runner.loss = partial(poisoned, trainer.model)
        for victims[0] in range(world_size):
            assert not math.isfinite(trainer.train_step().grad_norm)
        for key, tensor in saved_tensors(trainer).items():
            assert torch.equal(tensor, before[key]), key
        trainer.runner.loss = partial(loss_fn, trainer.model)
        return trainer.optimizer.skipped_steps.item(), trainer.train_step().loss.item()

    results = run_ranks(rank_main, 4)
    assert results == [results[0]] * 4 and results[0][0] == 4 and math.isfinite(results[0][1])


def test_auxiliary_losses_are_reported_apart():
    plain, result = (make_trainer(num_routers=number).train_step() for number in (0, 2))
    assert abs(result.loss - plain.loss) < 1e-12 and result.aux_loss > 0


def test_a_skipped_step_moves_no_bias_and_biases_come_back(tmp_path):
    trainer = make_trainer(num_routers=2, run_dir=str(tmp_path))
    trainer.train_step()
    before = [router.bias.clone() for router in trainer.model.routers]

    def poisoned(model, batch):
        loss, *rest = stats_loss_fn(model, batch)
        return loss * math.nan, *rest

    trainer.runner.loss = partial(poisoned, trainer.model)
    result = trainer.train_step()
    assert not math.isfinite(result.grad_norm) and result.expert_counts.sum() == 2 * GLOBAL_BATCH
    assert trainer.model.routers[0].seen[-1] == [0] * E
    assert all(torch.equal(r.bias, b) for r, b in zip(trainer.model.routers, before, strict=True))
    trainer.save()
    again = make_trainer(num_routers=2, run_dir=str(tmp_path))
    assert again.resume()
    assert all(torch.equal(r.bias, b) for r, b in zip(again.model.routers, before, strict=True))


def test_routers_and_rows_of_counts_must_agree():
    with pytest.raises(ValueError, match="the model has 3 routers, the counts of the loss function 2 rows"):
        make_trainer(num_routers=3).train_step()


def test_the_log_tells_the_load_of_a_window(tmp_path):
    """Counts of all steps since the last line; read only where a line is due."""
    trainer = make_trainer(num_routers=2, run_dir=str(tmp_path), log_interval=3)
    counts = []
    for router in trainer.model.routers:
        router.update_expert_bias = counts.append
    stream = io.StringIO()
    run = RunInfo(total_steps=40, tokens_per_step=GLOBAL_BATCH)
    with TrainLog(tmp_path / "gpt", run, log_interval=3, stream=stream) as log:
        trainer.config = replace(trainer.config, steps=6)
        trainer.train(log)
    lines = [r for r in read_metrics(tmp_path / "gpt" / "metrics.jsonl") if r["kind"] == "experts"]
    assert [line["step"] for line in lines] == [1, 3, 6]
    window = torch.stack(counts).view(6, 2, E)[3:].sum(0).double()
    loads = window / window.mean(1, keepdim=True)
    assert lines[-1]["max_load"] == pytest.approx(loads.amax(1).tolist())
    assert lines[-1]["min_load"] == pytest.approx(loads.amin(1).tolist())
    assert lines[-1]["aux_loss"] > 0
    assert f"expert load {loads.max():.2f}" in stream.getvalue().splitlines()[-1]
    picture = plot_loads(tmp_path / "gpt" / "metrics.jsonl", tmp_path / "load.png", title="load")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000
