"""A stand-in for a model with an expert layer, small enough to be seen through.

Token t goes to expert t % E, tokens are divided over all ranks, and every rank of the expert group sees all
tokens of the group.
"""

from __future__ import annotations

import torch
from torch import nn

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
from fastmp.training.trainer import ExpertStats, Trainer

E, F, H = 8, 16, 12  # experts, hidden units of each, features
GLOBAL_BATCH, MICRO_BATCH = 64, 8


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

    def validation_batches(self, dp_rank, dp_size, *, max_batches=None):
        yield from (
            self.batch(10**6, number, 8 // dp_size, dp_rank, dp_size) for number in range(8 // dp_size)
        )


def loss_fn(model, batch):
    error = model(batch["x"], batch["expert"]) - batch["y"]
    return error.square().sum(), torch.tensor(len(error))


def stats_loss_fn(model, batch):
    """Two layers' counts of this rank's tokens, and a loss of the same, which reaches the gate only."""
    own, expert = (split_to_group(batch[name], model.tp, 0) for name in ("x", "expert"))
    counts = torch.bincount(expert, minlength=E)
    aux_loss = reduce_from_group((own @ model.gate.t()).square().sum(), model.tp)
    return *loss_fn(model, batch), ExpertStats(aux_loss, torch.stack([counts, counts.roll(1)]))


def make_trainer(
    groups=ParallelGroups.alone(), layout=None, *, seed=5, clip=0.0, num_routers=0, buckets=10**6, **train
):
    config = TrainConfig(global_batch_size=GLOBAL_BATCH, eval_interval=0, steps=40, **train)
    optimizer = OptimizerConfig(
        lr=1e-2, min_lr=1e-3, warmup_steps=2, weight_decay=0.1, clip_grad_norm=clip, bucket_size=buckets
    )
    function = stats_loss_fn if num_routers else loss_fn
    model = Model(groups, seed, num_routers)
    return Trainer(model, Rows(), function, config, optimizer=optimizer, groups=groups)
