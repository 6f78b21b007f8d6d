"""Shared by the tests of training: trainers of small models on any layout, and how to compare them."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from train_tools import DENSE, EXPERTS, Samples, gather_main_grads, saved_tensors

from fastmp.config import GPTConfig, OptimizerConfig, ParallelConfig, TrainConfig
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.optim.named_params import named_parameters
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.parallel import full_tensor
from fastmp.training.language import bert_and_loss, gpt_and_loss
from fastmp.training.trainer import Trainer

OPTIMIZER = OptimizerConfig(lr=3e-3, min_lr=1e-4, warmup_steps=2)
BUCKETS = replace(OPTIMIZER, bucket_size=2000)  # some for each layer
MICRO_BATCH, NUM_MICROBATCHES, STEPS = 4, 4, 3  # samples of a microbatch, over all data-parallel ranks


def case(config=DENSE, **layout):
    return config, ParallelConfig(**layout)


def make_groups(world_size, layout=None, **sizes):
    """Return the groups of a layout, or of sizes such as tp=2; a single rank has none."""
    if world_size == 1:
        return ParallelGroups.alone()
    if layout is not None:
        sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    return ParallelGroups.create(RankGrid(world_size=world_size, **sizes))


def make_trainer(
    groups=ParallelGroups.alone(),
    layout=None,
    *,
    config=EXPERTS,
    seed=11,
    dtype=torch.float64,
    device="cpu",
    micro_batch=MICRO_BATCH,
    samples=Samples,
    data=None,
    optimizer=OPTIMIZER,
    checkpoint=None,
    graphs=None,
    graph_manager=None,
    overlap_experts=False,
    fp8=None,
    frozen=None,
    bert=None,
    **train,
):
    """Return a trainer of the whole model, or of the stages of `layout`; train: fields of TrainConfig.

    frozen: name of a parameter -> True if it is not trained. bert: options of `bert_and_loss`.
    """
    cp = {} if groups.cp is None else {"cp_rank": group_rank(groups.cp)}
    rng = RngTracker(seed, tp_rank=group_rank(groups.tp), **cp, device=device)
    layout = ParallelConfig() if layout is None else layout
    make, more = (gpt_and_loss, {"fp8": fp8}) if config.bert is None else (bert_and_loss, bert or {})
    model, loss = make(config, groups, layout, rng=rng, dtype=dtype, device=device, **more)
    if frozen is not None:
        for name, param in named_parameters([model] if isinstance(model, nn.Module) else model):
            param.requires_grad_(not frozen(name))
    train = {"steps": 40, "global_batch_size": MICRO_BATCH * NUM_MICROBATCHES, "eval_interval": 0, **train}
    return Trainer(
        model,
        samples(micro_batch // group_size(groups.dp), strides=3) if data is None else data,
        loss,
        TrainConfig(**train),
        optimizer=optimizer,
        checkpoint=checkpoint,
        groups=groups,
        rng=rng,
        graphs=graphs,
        graph_manager=graph_manager,
        overlap_experts=overlap_experts,
    )


SMALL = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=131, max_seq_len=32, init_std=0.1)
SMALL_OPTIMIZER = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=4)


def make_small(groups=ParallelGroups.alone(), layout=None, *, micro_batch=2, **options):
    """Return a trainer of SMALL on 8 samples a step, `micro_batch` of them a microbatch on every rank."""
    options = {"config": SMALL, "optimizer": SMALL_OPTIMIZER, "global_batch_size": 8, **options}
    return make_trainer(groups, layout, data=Samples(micro_batch), **options)


def factor_of(name: str) -> float | None:
    """The number that a parameter's hook multiplies gradients by; None: it has no hook."""
    return (0.0, 0.5, -2.0, None)[zlib.crc32(name.encode()) % 4]


def hook(trainer):
    """Give three of four parameters a hook, which scales their gradients."""
    handles = []
    for name, param in named_parameters(trainer.runner.chunks):
        if (factor := factor_of(name)) is not None:
            handles.append(param.register_hook(partial(torch.mul, other=factor)))
    assert handles
    return handles


def hooked(*arguments, **options):
    trainer = make_trainer(*arguments, **options)
    hook(trainer)
    return trainer


class Regression:
    """A user's own data for a user's own model: batches with other names than fastmp's."""

    micro_batch_size = 4

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype

    def batch(self, step, microbatch, num_microbatches, dp_rank, dp_size):
        generator = torch.Generator().manual_seed((step * num_microbatches + microbatch) * dp_size + dp_rank)
        x = torch.randn(self.micro_batch_size, 6, generator=generator)
        return {"x": x.to(self.dtype), "y": x.cumsum(1)[:, 3:].to(self.dtype)}

    def validation_batches(self, dp_rank, dp_size, *, max_batches=None):
        yield self.batch(10**6, 0, 1, dp_rank, dp_size)


def regression_loss(model, batch):
    error = model(batch["x"]) - batch["y"]
    return error.square().sum(), torch.tensor(error.numel(), device=error.device)


def plain_model():
    """Return a model with running averages, which forward changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


class OnDevice(Trainer):
    """A trainer for models on the device "meta": its batches have no values either."""

    def _to_device(self, batch):
        return {name: torch.empty_like(tensor, device=self.device) for name, tensor in batch.items()}


def whole(trainer, tensor_of):
    """Return {name: the undivided tensor} of this rank's parameters, padding of the vocabulary cut off."""
    groups, full = trainer.groups, {}
    for name, param in named_parameters(trainer.runner.chunks):
        own = tensor_of(param).detach().clone()
        tensor = full_tensor(own, param, groups.tp, etp_group=groups.etp, ep_group=groups.ep)
        full[name] = tensor[: DENSE.vocab_size] if name == "word_embedding.weight" else tensor
    return full


def run(trainer, steps=STEPS):
    """Numbers of each step, gradients of the first, parameters and biases at the end, an evaluation.

    The evaluation comes before the last step, whose numbers show that it has left nothing behind.
    """
    curve, counts = [], []
    for step in range(steps):
        if step == steps - 1:
            evaluation = trainer.evaluate()
        result = trainer._train_step()  # whose parameters come while the next one runs
        aux = 0.0 if result.aux_loss is None else result.aux_loss.item()
        losses = [result.loss.item(), result.mtp_loss.item(), aux]
        curve.append([*losses, result.num_tokens.item(), result.grad_norm.item()])
        counts.append(None if result.expert_counts is None else result.expert_counts.tolist())
        if step == 0:
            gather_main_grads(trainer.grads)
            grads = whole(trainer, lambda param: param.main_grad)
    biases = {
        name: bias
        for chunk in trainer.runner.chunks
        for name, bias in chunk.named_buffers()
        if name.endswith("expert_bias")
    }
    trainer.optimizer.gather.wait()
    params = whole(trainer, lambda param: param)
    for name in trainer.grads.gathered_in_fp8:  # whose values are with their owners
        del params[name]
    return curve, counts, grads, params, biases, evaluation


def checksums(trainer):
    """Return {(name, place of the shard): CRC-32} of this rank's parameters; replicas have the same keys.

    Of weights that are gathered in FP8, the copies are replicas.
    """
    groups, found, copies = trainer.groups, {}, trainer.grads.gathered_in_fp8
    for name, param in named_parameters(trainer.runner.chunks):
        marks = parallel_attributes(param)
        place = [group_rank(groups.ep)] if marks.expert_parallel else []
        if marks.tensor_model_parallel:
            place.append(group_rank(groups.etp if marks.expert_parallel else groups.tp))
        tensors = copies[name].tensors if name in copies else (param.detach(),)
        found[name, *place] = [zlib.crc32(t.view(torch.uint8).numpy().tobytes()) for t in tensors]
    return found


def check_replicas(of_ranks):
    """Compare the `checksums` of all ranks; return those of all shards."""
    shards = {}
    for found in of_ranks:
        for place, checksum in found.items():
            assert shards.setdefault(place, checksum) == checksum, f"{place} differs between its replicas"
    return shards


def check_resume(make, make_again=None, steps=6):
    """Train steps in one go; then half of them, a checkpoint, new objects from another seed, and the rest.

    Losses, parameters and optimizer states are the same bits. Return the saved tensors at the end.
    """
    straight = make()
    expected = [straight.train_step().loss.item() for _ in range(steps)]
    first = make()
    losses = [first.train_step().loss.item() for _ in range(steps // 2)]
    first.save()
    second = (make_again or make)(seed=99)
    assert second.resume() and second.step == steps // 2
    losses += [second.train_step().loss.item() for _ in range(steps - steps // 2)]
    assert losses == expected
    tensors = saved_tensors(second)
    for name, tensor in saved_tensors(straight).items():
        assert torch.equal(tensor, tensors[name]), name
    return tensors
