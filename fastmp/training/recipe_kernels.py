"""List the Triton kernels of a recipe without a GPU, and compile them before the first step.

Every pipeline stage is built on the device "meta" with fake process groups. It runs the forward and backward
of a microbatch, an optimizer step and an evaluation, while `fastmp.ops.precompile` records its launches.
Other numbers of tokens launch the same kernels.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.config import DISPATCHERS, Recipe
from fastmp.config.console import Console, to_stderr
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.distributed.runtime import Runtime
from fastmp.nn.documents import Documents
from fastmp.nn.segment import StageOutput
from fastmp.ops.precompile import (
    Code,
    compile_all,
    current_architecture,
    nothing_is_compiled,
    recording,
    require_compilation,
)
from fastmp.optim.from_config import make_grads, make_optimizer
from fastmp.optim.grad_norm import clip_coefficient, global_grad_norm
from fastmp.plan.layout import make_grid
from fastmp.tensor_parallel.fp8_linear import block_of
from fastmp.training.language import model_and_loss
from fastmp.training.microbatches import (
    Batch,
    LossFunction,
    MicrobatchLosses,
    PipelineLoss,
    evaluation_mode,
)
from fastmp.training.trainer import DTYPES

__all__ = ["codes_of_recipe", "warm_up_ranks", "warm_up_recipe"]


def warm_up_recipe(
    recipe: Recipe, world_size: int, arch: int, *, processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:  # fmt: skip
    """Compile the kernels of `recipe` on `world_size` ranks into Triton's cache; return their number.

    Call it in a process of its own: it initialises torch.distributed and seeds random generators.

    Args:
        recipe: must fit the ranks and have `model.vocab_size`.
        arch, processes, progress: see `fastmp.ops.warm_up`.

    Raises:
        ValueError: Triton is not installed, or runs in interpreter mode.
    """
    require_compilation()
    codes = codes_of_recipe(recipe, world_size, arch)
    compile_all(codes, arch, processes=processes, progress=progress)
    return len(codes)


def warm_up_ranks(recipe: Recipe, runtime: Runtime) -> None:
    """Compile the kernels of `recipe` on every machine of a job; all ranks call this and wait.

    The first rank of each machine starts a process for it. If that fails, training continues, and kernels are
    compiled at their first launch.
    """
    if runtime.device.type != "cuda" or nothing_is_compiled():
        return
    if runtime.local_rank == 0:
        arguments = recipe, runtime.world_size, current_architecture()
        child = multiprocessing.get_context("spawn").Process(
            target=_warm_up, args=(*arguments, runtime.rank == 0)
        )
        child.start()
        child.join()
        if child.exitcode:
            to_stderr(
                f"fastmp: rank {runtime.rank}: kernels were not compiled beforehand, for the reason above; "
                "they are when they are first needed",
            )
    if runtime.world_size > 1:
        dist.barrier()


def _warm_up(recipe: Recipe, world_size: int, arch: int, speaks: bool) -> None:
    said: dict[str, Any] = {"progress": progress_line()} if speaks else {}
    warm_up_recipe(recipe, world_size, arch, **said)


def codes_of_recipe(recipe: Recipe, world_size: int, arch: int) -> list[Code]:
    """List the kernels that the ranks of `recipe` launch in training and evaluation, each once.

    torch.distributed must not be initialised; it is while this runs. See `warm_up_recipe`.
    """
    grid = make_grid(recipe, world_size)
    stages = grid.ranks("pp")[0]
    # Tensor-parallel ranks differ only in the loss, by the padding in their shard of the vocabulary.
    last = next(ranks for ranks in grid.ranks("tp") if stages[-1] in ranks)
    found: dict[Code, None] = {}
    for rank in dict.fromkeys((*stages, *last)):
        found |= codes_of_rank(recipe, rank, world_size, arch)
    return list(found)


def codes_of_rank(recipe: Recipe, rank: int, world_size: int, arch: int) -> dict[Code, None]:
    """List the kernels of one rank, as the keys of a dictionary; see `codes_of_recipe`."""
    with _pretended(rank, world_size), recording(arch) as codes, _HostReads(_count(recipe)):
        _run_once(recipe, world_size, arch)
    return codes


@contextmanager
def _pretended(rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed with the "fake" backend, whose collectives do nothing."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # makes the backend "fake" known

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _HostReads(TorchDispatchMode):
    """Return one number for every read of a meta tensor by the host, where counts are read.

    Collectives on meta tensors reach the pretended group as those on a CPU do: torch 2.10 has none for meta.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == _HOST:
            return torch.full(args[0].shape, self.number, dtype=kwargs.get("dtype") or args[0].dtype)
        if func.namespace == "c10d":
            return func.redispatch(_ON_CPU, *args, **kwargs)
        return func(*args, **kwargs)


def _count(recipe: Recipe) -> int:
    """Return the value of every count on the host: a rank's tokens if the dispatcher pads, else 1."""
    moe, layout = recipe.model.moe, recipe.parallel
    if moe is None or not DISPATCHERS[moe.dispatcher].host_counts_tokens:
        return 1
    return recipe.data.micro_batch_size * recipe.data.seq_len // (layout.tp * layout.cp)


_HOST, _META = torch.device("cpu"), torch.device("meta")
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _run_once(recipe: Recipe, world_size: int, arch: int) -> None:
    """Run a training step of one microbatch, and an evaluation of one batch."""
    layout = recipe.parallel
    groups = ParallelGroups.create(make_grid(recipe, world_size), local_only=True)
    cp: dict[str, Any] = {} if groups.cp is None else {"cp_rank": group_rank(groups.cp)}
    rng = RngTracker(recipe.train.seed, tp_rank=group_rank(groups.tp), **cp)
    dtype = DTYPES.get(recipe.train.dtype, torch.bfloat16)
    fp8 = recipe.train.fp8(block_of(arch))
    model, loss = model_and_loss(recipe, groups, rng=rng, device=_META, dtype=dtype, fp8=fp8)
    chunks = [model] if isinstance(model, nn.Module) else model
    grads = make_grads(chunks, recipe.optimizer, groups)
    optimizer = make_optimizer(grads, recipe.optimizer, groups)
    shape = recipe.data.micro_batch_size, recipe.data.seq_len
    ids = torch.empty(shape, dtype=torch.int64, device=_META)
    batch: Batch = {"tokens": ids, "targets": ids}
    if recipe.data.document_masking:
        batch["documents"] = Documents.from_position_ids(ids, max_documents=shape[0])
    if recipe.model.bert is not None:
        batch |= {"token_types": ids, "padding_mask": ids == 0, "sentence_order": ids[:, 0]}
    _microbatch(chunks, loss, batch, groups, layout.sequence_parallel)
    norm = global_grad_norm(grads, **groups.norm)
    clip = clip_coefficient(norm, recipe.optimizer.clip_grad_norm)
    lr = torch.empty((), dtype=torch.float64, device=_META)
    optimizer.step(lr, grad_norm=norm, inv_scale=norm, clip_coefficient=clip)
    with evaluation_mode(chunks):
        _microbatch(chunks, loss, batch, groups, layout.sequence_parallel)


def _microbatch(
    chunks: Sequence[nn.Module],
    loss: LossFunction | PipelineLoss,
    batch: Batch,
    groups: ParallelGroups,
    sequence_parallel: bool,
) -> None:
    """Run forward and, where gradients are recorded, backward of this rank's chunks."""
    if not isinstance(loss, PipelineLoss):
        _backward(MicrobatchLosses(*loss(chunks[0], batch)).total)
        return
    assert loss.inputs is not None
    parameter = next(chunks[0].parameters())
    micro_batch_size, length = batch["tokens"].shape
    length //= group_size(groups.cp) * (group_size(groups.tp) if sequence_parallel else 1)
    chunk: Any
    for chunk in chunks:
        hidden = torch.empty(
            length, micro_batch_size, chunk.config.hidden_size, dtype=parameter.dtype, device=_META,
            requires_grad=torch.is_grad_enabled(),
        )  # fmt: skip
        given = loss.inputs(batch) if chunk.stage_spec.first else hidden
        out = chunk(*(given if isinstance(given, tuple) else (given,)), **loss.shared(batch))
        tensors, aux_loss = (out.tensors, out.loss) if isinstance(out, StageOutput) else (out, None)
        tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        if chunk.stage_spec.last:
            tensors = [MicrobatchLosses(*loss.loss(*tensors, batch)).total]
        _backward(*tensors, aux_loss)


def _backward(*results: Tensor | None) -> None:
    given = [result for result in results if result is not None and result.requires_grad]
    if given:
        torch.autograd.backward(given, [torch.empty_like(result) for result in given])


def progress_line() -> Callable[[int, int], None]:
    """Return a `progress` function for `warm_up`: a line on stderr, rewritten on a terminal."""
    start = "\r" if Console(sys.stderr).is_terminal else ""

    def say(done: int, of: int) -> None:
        if start or done == of:
            to_stderr(f"compiled {done} of {of} kernels", start=start, end="\n" if done == of else "")

    return say
