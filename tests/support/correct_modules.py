"""Correct parallel modules of torch, of fastmp and of transformers, each with its dense module."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fastmp.config import MoEConfig
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Placement
from fastmp.nn.moe.layer import MoELayer
from fastmp.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    cut_sequence,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_log_probs,
)
from fastmp.testing.differential import Subject
from fastmp.testing.parallel import full_tensor
from tools.small_models import EXPERTS, QWEN, SMALL, part_of


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x)))).clone()  # FSDP2 warns of views


class TensorParallelMLP(Subject):
    layouts: ClassVar = {"tp": (1, 2, 4)}
    sizes: ClassVar = {"tokens": (4, 8)}
    plan: ClassVar = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def dense(self, case):
        return MLP()

    def parallel(self, dense, ranks):
        return parallelize_module(dense, ranks.mesh["tp"], self.plan)

    def inputs(self, case, generator):
        tokens = case["tokens"] + (4 * int(torch.randint(3, (), generator=generator)) if case.uneven else 0)
        return [torch.randn(tokens, 4, generator=generator)]


class SequenceParallelMLP(TensorParallelMLP):
    plan: ClassVar = {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)),
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }


class ShardedOutputMLP(TensorParallelMLP):
    placements: ClassVar = {"output": {"tp": 0}}
    plan: ClassVar = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(0))}


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).tanh())


class RowwiseEmbedding(TensorParallelMLP):
    plan: ClassVar = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def dense(self, case):
        return TokenModel()

    def inputs(self, case, generator):
        return [torch.randint(8, (case["tokens"],), generator=generator)]


class ColwiseEmbedding(RowwiseEmbedding):
    plan: ClassVar = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "head": RowwiseParallel(input_layouts=Replicate()),
    }


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(0, 1) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(0, 1).flatten(1))


class TensorParallelAttention(TensorParallelMLP):
    plan: ClassVar = {**{name: ColwiseParallel() for name in "qkv"}, "o": RowwiseParallel()}

    def dense(self, case):
        return Attention()

    def inputs(self, case, generator):
        return [torch.randn(case["tokens"], 8, generator=generator)]


class FSDP(TensorParallelMLP):
    layouts: ClassVar = {"dp": (1, 2, 4)}

    def parallel(self, dense, ranks):
        return fully_shard(dense, mesh=ranks.mesh["dp"])

    def divisor(self, local, ranks):
        return super().divisor(local, ranks) / ranks.size("dp")

    def norm(self, model, ranks):
        return torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])


class FSDPByLayer(FSDP):
    def parallel(self, dense, ranks):
        for layer in (dense.up, dense.down):
            fully_shard(layer, mesh=ranks.mesh["dp"], reshard_after_forward=False)
        return fully_shard(dense, mesh=ranks.mesh["dp"])


class FSDPWithLastReduction(FSDP):
    """Gradients are reduced after the last microbatch only."""

    def parallel(self, dense, ranks):
        self.number, self.microbatches = 0, ranks.case.accumulation
        return super().parallel(dense, ranks)

    def forward(self, model, batch):
        if hasattr(model, "set_requires_gradient_sync"):
            self.number += 1
            model.set_requires_gradient_sync(self.number % self.microbatches == 0)
        return super().forward(model, batch)


class FSDPWithTensorParallelism(FSDP):
    layouts: ClassVar = {"dp": (1, 2), "tp": (1, 2)}

    def parallel(self, dense, ranks):
        parallelize_module(dense, ranks.mesh["tp"], self.plan)
        return fully_shard(dense, mesh=ranks.mesh["dp"])

    norm = Subject.norm


class HybridSharding(FSDP):
    layouts: ClassVar = {"replicate": (1, 2), "shard": (2,)}
    data_axes: ClassVar = ("replicate", "shard")

    def parallel(self, dense, ranks):
        return fully_shard(dense, mesh=ranks.mesh)

    def divisor(self, local, ranks):
        return Subject.divisor(self, local, ranks) / ranks.case.world_size


class DataParallel(FSDP):
    def parallel(self, dense, ranks):
        return nn.parallel.DistributedDataParallel(dense, process_group=ranks.group("dp"))

    def dense_name(self, name, ranks):
        return name.removeprefix("module.")


class Ours(Subject):
    """A module of fastmp that `build(placement)` makes, on the grid of the layout."""

    layouts: ClassVar = {"tp": (1, 2, 4)}
    sizes: ClassVar = {"tokens": (8, 16)}
    sequence_parallel = False
    grid: ClassVar = {}

    def build(self, on: Placement) -> nn.Module:
        raise NotImplementedError

    def place(self, groups: ParallelGroups, **options) -> Placement:
        from fastmp.distributed.collectives import group_rank

        rng = RngTracker(7, tp_rank=group_rank(groups.tp), cp_rank=group_rank(groups.cp))
        return Placement(groups, rng=rng, dtype=torch.float64, **options)

    def dense(self, case):
        return self.build(self.place(ParallelGroups.alone()))

    def parallel(self, dense, ranks):
        sizes = {axis: size for axis, size in ranks.case.layout if axis != "dp"}
        sizes |= {axis: ranks.size(of) for axis, of in self.grid.items()}
        self.groups = ParallelGroups.create(RankGrid(world_size=ranks.case.world_size, **sizes))
        model = self.build(self.place(self.groups, sequence_parallel=self.sequence_parallel))
        with torch.no_grad():
            for full, param in zip(dense.parameters(), model.parameters(), strict=True):
                param.copy_(part_of(full, param, self.groups))
        return model

    def full(self, name, tensor, param, ranks):
        groups = self.groups
        full = full_tensor(tensor, param, groups.tp, etp_group=groups.etp, ep_group=groups.ep)
        return full, {}

    def synchronize(self, model, ranks):
        for param in model.parameters():
            for marked, group in (
                (True, self.groups.edp if getattr(param, "expert_parallel", False) else self.groups.dp_cp),
                (getattr(param, "sequence_parallel", False), self.groups.tp),
            ):
                if marked and group is not None:
                    dist.all_reduce(param.grad, group=group)


class Columns(nn.Module):
    """Column- and row-parallel layers in a row."""

    def __init__(self, on: Placement) -> None:
        super().__init__()
        options = {"group": on.groups.tp, "rng": on.rng, "dtype": on.dtype}
        options["sequence_parallel"] = on.sequence_parallel
        self.up = ColumnParallelLinear(4, 8, gather_output=False, **options)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True, **options)

    def forward(self, x):
        def output(out):
            return out[0] if isinstance(out, tuple) else out

        return output(self.down(torch.tanh(output(self.up(x)))))


class OurLayers(Ours):
    def build(self, on):
        return Columns(on)

    def inputs(self, case, generator):
        return [torch.randn(case["tokens"], 2, 4, generator=generator)]


class OurSequenceParallelLayers(OurLayers):
    sequence_parallel = True
    placements: ClassVar = {"output": {"tp": 0}}

    def forward(self, model, batch):
        x = batch[0]
        if model.up.sequence_parallel:
            x = x.chunk(model.up.tp_size)[model.up.tp_rank]
        return model(x)


class Head(nn.Module):
    """An embedding and one of the losses over the shards of its vocabulary."""

    def __init__(self, on: Placement, loss: str) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(16, 4, group=on.groups.tp, rng=on.rng, dtype=on.dtype)
        self.output = ColumnParallelLinear(
            4, 16, group=on.groups.tp, rng=on.rng, dtype=on.dtype, bias=False, gather_output=False
        )
        self.loss, self.group = loss, on.groups.tp

    def forward(self, tokens, target):
        hidden, options = self.embedding(tokens).tanh(), {"group": self.group}
        if self.loss == "cross_entropy":
            logits = self.output(hidden)
            logits = logits[0] if isinstance(logits, tuple) else logits
            return vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1, z_loss=0.01, **options)
        args = (hidden, self.output.weight, target)
        if self.loss == "log_probs":
            return vocab_parallel_linear_log_probs(*args, temperature=0.7, **options)
        return vocab_parallel_linear_cross_entropy(*args, label_smoothing=0.1, **options)


class OurCrossEntropy(Ours):
    loss_name = "cross_entropy"

    def build(self, on):
        return Head(on, self.loss_name)

    def inputs(self, case, generator):
        tokens, target = torch.randint(16, (2, case["tokens"], 2), generator=generator)
        if case.ignored and self.loss_name != "log_probs":
            target[torch.rand(target.shape, generator=generator) < 0.4] = -100
        return {"tokens": tokens, "target": target}


class OurLinearCrossEntropy(OurCrossEntropy):
    loss_name = "linear_cross_entropy"


class OurLogProbs(OurCrossEntropy):
    loss_name = "log_probs"


class OurGPT(Ours):
    """A GPT with its loss over data-, context- and tensor-parallel ranks."""

    layouts: ClassVar = {"dp": (1, 2), "tp": (1, 2, 4)}
    config = replace(QWEN, vocab_size=512, max_seq_len=16)

    def build(self, on):
        return GPT(self.config, on)

    def inputs(self, case, generator):
        return list(torch.randint(512, (2, 2, case["tokens"]), generator=generator))

    def forward(self, model, batch):
        batch = [cut_sequence(x, getattr(model, "cut_over", None)) for x in batch]
        loss = model.loss(*batch)
        return loss if self.config.moe is None else {"tokens": loss.tokens, "aux": loss.aux}


class OurSequenceParallelGPT(OurGPT):
    sequence_parallel = True


class OurTiedGPT(OurGPT):
    config = replace(SMALL, vocab_size=512, max_seq_len=16)


class OurContextParallelGPT(OurGPT):
    """Every rank has slices of the sequence, whose losses are compared in their order."""

    layouts: ClassVar = {"cp": (2, 4)}
    data_axes: ClassVar = ()
    placements: ClassVar = {"output": None, "loss": {"cp": "sum"}}

    def parallel(self, dense, ranks):
        model = super().parallel(dense, ranks)
        model.cut_over = self.groups.cp
        return model

    def loss(self, outputs, batch):
        return outputs.sum()


class OurExperts(Ours):
    """A layer of experts over the data-parallel ranks; every rank has its own tokens."""

    layouts: ClassVar = {"dp": (2, 4)}
    grid: ClassVar = {"ep": "dp"}
    dispatcher = "alltoall"

    def build(self, on):
        moe = MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=4, dispatcher=self.dispatcher)
        return MoELayer(replace(EXPERTS, hidden_size=8, moe=moe), on)

    def inputs(self, case, generator):
        x = torch.randn(case["tokens"], 2, 8, generator=generator)
        return [x[:1].expand_as(x).clone() if case.empty_experts else x]

    def forward(self, model, batch):
        return model(*batch)[0]


class OurGatheredExperts(OurExperts):
    dispatcher = "allgather"


class OurSymmetricExperts(OurExperts):
    dispatcher = "symmetric"


class OurTensorParallelExperts(OurExperts):
    layouts: ClassVar = {"dp": (1, 2), "tp": (2,)}


class OurSharedTokensExperts(OurExperts):
    layouts: ClassVar = {"tp": (2, 4)}
    grid: ClassVar = {}


CORRECT = [
    value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Subject) and name not in ("Subject", "Ours")
]
