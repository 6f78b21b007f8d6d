"""Parameters of experts in training: on every layout the gradients, norm, steps and checkpoints of one rank.

A stand-in for an expert layer, small enough to be seen through: token t goes to expert t % E, tokens are
divided over all ranks, and every rank of the expert group sees all tokens of the group.
"""

from __future__ import annotations

import io
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from marks import full
from torch import nn
from train_tools import gather_main_grads, saved_tensors
from trainer_tools import check_replicas, check_resume, checksums, make_groups, whole

from fastmp.config import OptimizerConfig, TrainConfig
from fastmp.distributed.collectives import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    group_rank,
    group_size,
    reduce_from_group,
    reduce_scatter_sequence,
    split_to_group,
)
from fastmp.distributed.groups import ParallelGroups
from fastmp.tensor_parallel.attributes import local_shard
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.format import read_manifest
from fastmp.training.metrics import RunInfo, TrainLog, read_metrics
from fastmp.training.plot import plot_loads
from fastmp.training.trainer import ExpertStats, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

E, F, H = 8, 16, 12  # experts, hidden units of each, features
GLOBAL_BATCH, MICRO_BATCH = 64, 8
# World size, tp, ep, etp
LAYOUTS = [
    (2, 2, 2, 1),
    (4, 2, 2, 2),
    *full(
        [
            (2, 1, 2, 1),
            (2, 2, 1, 2),
            (2, 1, 1, 2),
            (4, 2, 2, 1),
            (4, 1, 4, 1),
            (4, 4, 2, 2),
            (4, 4, 1, 1),
            (8, 2, 2, 2),
            (8, 2, 4, 1),
            (8, 4, 8, 1),
        ]
    ),
]


class Experts(nn.Module):
    """E x (scale, up, tanh, down, bias) of this rank: matrices cut over `etp`, vectors the same on it."""

    def __init__(self, groups):
        super().__init__()
        self.etp, self.ep = groups.etp, groups.ep
        shapes = {"scale": (E, H), "up": (E, F, H), "down": (E, H, F), "bias": (E, H)}
        cuts = {"up": 1, "down": 2}
        for name, shape in shapes.items():
            full = torch.randn(shape, dtype=torch.float64) * 0.3
            shard = full.chunk(group_size(self.ep))[group_rank(self.ep)]
            if name in cuts:
                shard = local_shard(shard, cuts[name], 1, group_size(self.etp), group_rank(self.etp))
            param = nn.Parameter(shard.clone())
            param.expert_parallel = True
            if name in cuts:
                param.tensor_model_parallel, param.partition_dim = True, cuts[name]
            setattr(self, name, param)

    def forward(self, x_TH, expert_T):
        rows = gather_sequence(gather_from_group(x_TH, self.etp, 0), self.ep)
        expert = gather_sequence(gather_from_group(expert_T, self.etp, 0), self.ep)
        output = torch.zeros_like(rows)
        first = group_rank(self.ep) * len(self.up)
        for i in range(len(self.up)):
            mine = expert == first + i
            x = copy_to_group(rows[mine] * self.scale[i], self.etp)
            y = reduce_from_group(torch.tanh(x @ self.up[i].t()) @ self.down[i].t(), self.etp)
            output[mine] = y + self.bias[i]
        return split_to_group(reduce_scatter_sequence(output, self.ep), self.etp, 0)


class Router(nn.Module):
    """Routes nothing; keeps the counts that it is shown, and a bias towards the experts that had less."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))
        self.seen = []

    def update_expert_bias(self, counts):
        self.seen.append(counts.tolist())
        self.bias += (counts.double().mean() - counts).sign()


class Model(nn.Module):
    """A tensor-parallel pair of layers, then experts on this rank's part of the tokens."""

    def __init__(self, groups, seed, num_routers=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tp = groups.tp
        options = {"group": self.tp, "dtype": torch.float64}
        self.up = ColumnParallelLinear(H, 4 * H, gather_output=False, **options)
        self.down = RowParallelLinear(4 * H, H, input_is_parallel=True, **options)
        self.gate = nn.Parameter(torch.randn(H, H, dtype=torch.float64) * 0.3)
        self.gate.sequence_parallel = True
        self.experts = Experts(groups)
        self.routers = nn.ModuleList(Router() for _ in range(num_routers))

    def forward(self, x_TH, expert_T):
        x_TH = x_TH + self.down(torch.tanh(self.up(x_TH)))
        own, expert = (split_to_group(tensor, self.tp, 0) for tensor in (x_TH, expert_T))
        own = own + self.experts(own @ self.gate.t(), expert)
        return gather_from_group(own, self.tp, 0)


class Rows:
    """Random rows, each a function of its number, to be mapped to their cumulative sums."""

    micro_batch_size = MICRO_BATCH

    def batch(self, step, microbatch, num_microbatches, dp_rank, dp_size):
        first = ((step * num_microbatches + microbatch) * dp_size + dp_rank) * MICRO_BATCH
        generators = [torch.Generator().manual_seed(first + i) for i in range(MICRO_BATCH)]
        x = torch.stack([torch.randn(H, dtype=torch.float64, generator=g) for g in generators])
        return {"x": x, "expert": (first + torch.arange(MICRO_BATCH)) * 5 % 7 % E, "y": x.cumsum(1)}


def loss_fn(model, batch):
    error = model(batch["x"], batch["expert"]) - batch["y"]
    return error.square().sum(), torch.tensor(len(error))


def stats_loss_fn(model, batch):
    """Two layers' counts of this rank's tokens, and a loss of the same, which reaches the gate only."""
    own, expert = (split_to_group(batch[name], model.tp, 0) for name in ("x", "expert"))
    counts = torch.bincount(expert, minlength=E)
    aux_loss = reduce_from_group((own @ model.gate.t()).square().sum(), model.tp)
    return *loss_fn(model, batch), ExpertStats(aux_loss, torch.stack([counts, counts.roll(1)]))


def make_trainer(groups=ParallelGroups.alone(), *, seed=5, clip=0.0, num_routers=0, buckets=10**6, **train):
    config = TrainConfig(global_batch_size=GLOBAL_BATCH, eval_interval=0, steps=40, **train)
    optimizer = OptimizerConfig(
        lr=1e-2, min_lr=1e-3, warmup_steps=2, weight_decay=0.1, clip_grad_norm=clip, bucket_size=buckets
    )
    function = stats_loss_fn if num_routers else loss_fn
    model = Model(groups, seed, num_routers)
    return Trainer(model, Rows(), function, config, optimizer=optimizer, groups=groups)


def train(trainer, steps=4):
    """Loss, norm and all gradients of the first step; then all parameters after `steps`."""
    first = trainer.train_step()
    gather_main_grads(trainer.grads)
    grads = whole(trainer, lambda param: param.main_grad)
    results = [first, *(trainer.train_step() for _ in range(steps - 1))]
    curve = [(result.loss.item(), result.grad_norm.item()) for result in results]
    return curve, grads, whole(trainer, lambda param: param)


@pytest.fixture(scope="module")
def one_rank():
    return train(make_trainer(clip=1.0))


def test_one_rank_is_plain_autograd(one_rank):
    """What the layouts are compared with: the norm is that of all gradients, and clipping matters."""
    (loss, norm), *rest = one_rank[0]
    assert norm > 2.0 and rest[-1][0] < loss
    expected = math.sqrt(sum(grad.square().sum().item() for grad in one_rank[1].values())) / GLOBAL_BATCH
    assert abs(norm - expected) < 1e-10


@pytest.mark.parametrize(("world", "tp", "ep", "etp"), LAYOUTS)
def test_every_layout_is_one_rank(one_rank, world, tp, ep, etp):
    """Loss, norm, every gradient and parameter to 1e-10, with clipping; replicas bitwise equal."""

    def rank_main(rank, world_size):
        groups = make_groups(world_size, tp=tp, ep=ep, etp=etp)
        trainer = make_trainer(groups, clip=1.0, buckets=100)
        return *train(trainer), checksums(trainer)

    curve, grads, params = one_rank
    results = run_ranks(rank_main, world)
    shards = check_replicas(bits for *_, bits in results)
    for mine, my_grads, my_params, _ in results:
        assert mine == results[0][0], "bits differ between ranks"
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(curve), rtol=0, atol=1e-10)
        for name in grads:
            torch.testing.assert_close(my_grads[name], grads[name], rtol=0, atol=1e-10, msg=name)
            torch.testing.assert_close(my_params[name], params[name], rtol=0, atol=1e-10, msg=name)
    assert len([place for place in shards if place[0] == "experts.up"]) == ep * etp


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


@pytest.mark.parametrize(
    ("world", "tp", "ep", "etp"),
    [(2, 2, 2, 1), *full([(2, 1, 2, 1), (4, 2, 2, 1), (4, 2, 1, 2), (4, 1, 2, 2)])],
)
def test_resume_is_bitwise(tmp_path, world, tp, ep, etp):
    """Each shard is saved once."""

    def rank_main(rank, world_size):
        groups = make_groups(world_size, tp=tp, ep=ep, etp=etp)
        check_resume(partial(make_trainer, groups, run_dir=str(tmp_path)))

    run_ranks(rank_main, world)
    (path,) = (tmp_path / "gpt" / "checkpoints").glob("step-*")
    tensors = read_manifest(path).tensors
    assert len(tensors["model/experts.up"].shards) == ep * etp, "saved by one replica"
    assert len(tensors["model/up.weight"].shards) == tp


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
