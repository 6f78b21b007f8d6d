"""`fastmp verify` accepts transformers models on meshes: torch's own sharding, and `fastmp.accelerate`."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hf_models import VOCAB, Float64, model_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastmp
from fastmp.hf.tp_plan import clip_grad_norm_
from fastmp.testing.differential import Subject, verify

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)

pytestmark = pytest.mark.full


class Model(Subject):
    """A causal language model with tokens of its own on every rank, and its summed loss."""

    layouts: ClassVar = {"dp": (2, 4)}
    sizes: ClassVar = {"tokens": (6, 9)}
    family = "llama"

    def dense(self, case):
        return model_of(self.family, torch.float64)

    def inputs(self, case, generator):
        tokens = case["tokens"] + (int(torch.randint(4, (), generator=generator)) if case.uneven else 0)
        ids = torch.randint(3, VOCAB, (2, tokens), generator=generator)
        labels = ids.clone()
        if case.ignored:
            labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        return {"input_ids": ids, "labels": labels}

    def forward(self, model, batch):
        with Float64():
            return {"loss of tokens": model(**batch, num_items_in_batch=1).loss}

    def loss(self, outputs, batch):
        return outputs["loss of tokens"]

    def count(self, batch):
        return int((batch["labels"][:, 1:] != -100).sum())


class Sharded(Model):
    """FSDP2, which averages over ranks."""

    def parallel(self, dense, ranks):
        for layer in dense.model.layers:
            fully_shard(layer, mesh=ranks.mesh)
        return fully_shard(dense, mesh=ranks.mesh)

    def divisor(self, local, ranks):
        return super().divisor(local, ranks) / ranks.case.world_size

    def norm(self, model, ranks):
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


class Distributed(Sharded):
    def parallel(self, dense, ranks):
        return nn.parallel.DistributedDataParallel(dense)

    def dense_name(self, name, ranks):
        return name.removeprefix("module.")


class TensorParallel(Model):
    """Attention and MLP by torch's styles."""

    layouts: ClassVar = {"tp": (2,)}

    def parallel(self, dense, ranks):
        plan = {
            name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        }
        plan |= {name: ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj")}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        for layer in dense.model.layers:
            parallelize_module(layer, ranks.mesh["tp"], plan)
        return dense


class Accelerated(Sharded):
    """Experts over `ep`, and FSDP2."""

    layouts: ClassVar = {"dp_shard": (1, 2), "ep": (1, 2)}
    data_axes: ClassVar = ("dp_shard", "ep")
    family = "qwen3_moe"

    def parallel(self, dense, ranks):
        fastmp.accelerate(dense, mesh=ranks.mesh)
        return dense

    def norm(self, model, ranks):
        return clip_grad_norm_(model, float("inf"))


class AcceleratedMixtral(Accelerated):
    family = "mixtral"


@pytest.mark.parametrize(
    "subject",
    [Sharded, Distributed, TensorParallel, Accelerated, AcceleratedMixtral],
    ids=lambda s: s.__name__,
)
def test_gives_no_alarm(subject):
    verdict = verify(subject(), cases=4, shrinks=False, timeout=200)
    assert verdict.smallest is None, str(verdict.smallest)
