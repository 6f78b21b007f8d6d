"""Run cases: the dense module in one forked process, the parallel one on forked gloo ranks, in float64."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastmp.testing.differential.cases import Case
from fastmp.testing.differential.subject import SUM, Placement, Ranks, Subject
from fastmp.testing.ops import poisoned_memory
from fastmp.testing.ranks import RankError, run_ranks

__all__ = ["Crash", "Key", "Reference", "Run", "SavedTensors", "run_cases"]

Key = tuple[str, int, int, str]  # kind, step, microbatch (-1: none), name
Record = dict[Key, tuple[torch.Tensor, Placement]]


@dataclass
class Reference:
    """Results of the dense module.

    Attributes:
        outputs: (kind, step, microbatch, name) -> the tensor for each part of the data.
        inputs: the same of floating-point inputs.
        values: gradients ("gradient"), norms ("norm") and weights ("weight") of each step; weights of step
            -1 are the first ones.
        partial: (step, name) -> gradient of the summed loss of each (microbatch, part).
        counts: step -> count of each (microbatch, part).
    """

    outputs: dict[Key, list[torch.Tensor]] = field(default_factory=dict)
    inputs: dict[Key, list[torch.Tensor]] = field(default_factory=dict)
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    partial: dict[tuple[int, str], dict[tuple[int, int], torch.Tensor]] = field(default_factory=dict)
    counts: dict[int, dict[tuple[int, int], float]] = field(default_factory=dict)


@dataclass
class Crash:
    """The parallel code raised, died or hung.

    Attributes:
        rank: the first rank that did.
        error: last line of its traceback.
        text: the traceback, or the stacks.
    """

    rank: int
    error: str
    text: str

    @property
    def hung(self) -> bool:
        """Return True if no rank raised or died."""
        return self.text.startswith("hung")


@dataclass
class Run:
    """A case with the results of the dense module and of every rank, or the crash.

    overwritten: of a watched run, the saved tensors that rank 0 found changed in its backward pass.
    """

    case: Case
    reference: Reference
    ranks: list[Record] = field(default_factory=list)
    crash: Crash | None = None
    overwritten: tuple[str, ...] = ()


class SavedTensors(saved_tensors_hooks):
    """A context of a forward pass: copies what autograd saves, and compares when backward reads it.

    So it sees writes of kernels and through `.data`, which autograd does not.

    Args:
        buffers: of the module, which it may write to: batch norms save running statistics that they update.
    """

    def __init__(self, buffers: Iterable[torch.Tensor] = ()) -> None:
        self.overwritten: dict[str, None] = {}  # in order
        self._buffers = {each.data_ptr() for each in buffers if type(each) is torch.Tensor}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, str]:
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        if plain and tensor.data_ptr() in self._buffers:
            return tensor, None, ""
        return tensor, tensor.detach().clone(), _line()

    def _unpack(self, saved: tuple[torch.Tensor, torch.Tensor | None, str]) -> torch.Tensor:
        tensor, copy, line = saved
        if copy is None:
            return tensor
        same = (tensor == copy) | (tensor != tensor) & (copy != copy)  # NaN equals NaN
        if not same.all():
            self.overwritten[f"{tuple(tensor.shape)}, saved in {line}"] = None
        return tensor


def _line() -> str:
    """Return the file and line of the innermost call outside torch and this module."""
    frame: FrameType | None = sys._getframe(2)
    torch_files = str(Path(torch.__file__).parent)
    while frame is not None and frame.f_code.co_filename.startswith((torch_files, __file__)):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def run_cases(
    subject: Subject, cases: Sequence[Case], timeout: float = 60, *, watch: bool = False
) -> list[Run]:
    """Run the cases, those of one number of ranks in one fork; a crash ends only its own case.

    After a hang the cases that are left do not run: each might take as long. Their runs have no ranks.

    Args:
        timeout: seconds for the cases of one number of ranks, beyond ten times what the dense module took.
        watch: look for saved tensors that are overwritten before the backward pass reads them.

    Raises:
        ValueError: the dense module failed, so that there is nothing to compare with.
    """
    if not cases:
        return []
    started = time.monotonic()
    try:
        (references,) = run_ranks(
            lambda *_: [_reference(subject, case) for case in cases], 1, timeout=10 * timeout
        )
    except RankError as error:
        raise ValueError(f"the dense module failed, so there is nothing to compare with\n{error}") from None
    spent = time.monotonic() - started
    runs = [Run(case, reference) for case, reference in zip(cases, references, strict=True)]
    waiting: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        waiting[run.case.world_size].append(run)
    for world_size, left in sorted(waiting.items()):
        while left and not any(run.crash and run.crash.hung for run in runs):
            left = _run_some(subject, left, world_size, timeout + 10 * world_size * spent, watch)
    return runs


def _run_some(subject: Subject, runs: list[Run], world_size: int, timeout: float, watch: bool) -> list[Run]:
    """Run cases until all are done or one crashes; return those that are left."""
    reached = torch.full((world_size,), -1).share_memory_()

    def on_rank(rank: int, _: int) -> list[tuple[Record, tuple[str, ...]]]:
        # Full tensors of DTensors on two axes are for comparison: their cost is no news to the user.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        meshes: dict[Any, DeviceMesh] = {}
        records = []
        for index, run in enumerate(runs):
            reached[rank] = index
            layout = run.case.layout
            if layout not in meshes:
                axes, shape = zip(*layout, strict=True)
                meshes[layout] = init_device_mesh("cpu", shape, mesh_dim_names=axes)
            ranks = Ranks(run.case, meshes[layout])
            records.append(_parallel(subject, run.reference, ranks, watch))
        return records

    try:
        results = run_ranks(on_rank, world_size, timeout=timeout)
    except RankError as error:
        index = int(reached[error.rank])
        lines = [
            line for line in str(error).splitlines() if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)
        ]
        last = lines[-1] if lines else str(error).splitlines()[0]
        runs[index].crash = Crash(error.rank, last.strip(), str(error))
        return [run for position, run in enumerate(runs) if position != index]
    for run, *found in zip(runs, *results, strict=True):
        run.ranks = [record for record, _ in found]
        run.overwritten = found[0][1]
    return []


def _dense(subject: Subject, case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    return subject.dense(case).double()


def _batches(subject: Subject, case: Case) -> list[list[list[Any]]]:
    """Return the batch of every step, microbatch and part of the data."""
    generator = torch.Generator().manual_seed(case.seed)
    parts = case.num_parts(subject.data_axes)
    return [
        [[_float64(subject.inputs(case, generator)) for _ in range(parts)] for _ in range(case.accumulation)]
        for _ in range(case.steps)
    ]


def _float64(batch: Any) -> Any:
    def convert(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return torch.utils._pytree.tree_map(convert, batch)


def named(outputs: Any, kind: str = "output") -> dict[str, torch.Tensor]:
    """Return the floating-point tensors among a module's outputs, or its inputs, by their names."""
    if isinstance(outputs, torch.Tensor):
        outputs = {kind: outputs}
    elif not isinstance(outputs, Mapping):
        outputs = {f"{kind}[{index}]": value for index, value in enumerate(outputs)}
    return {
        name: value
        for name, value in outputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def _projection(value: torch.Tensor, placement: Placement, ranks: Ranks | None) -> torch.Tensor:
    """Return a quadratic function of an output with fixed weights, a linear one of partial sums.

    A shard has its shard of the weights.
    """
    shape = list(value.shape)
    cuts = [(axis, dim) for axis, dim in placement.items() if dim != SUM and ranks is not None]
    for axis, dim in cuts:
        shape[dim] *= ranks.size(axis) if ranks is not None else 1
    weights = torch.cos(torch.arange(math.prod(shape), dtype=torch.float64) * 0.7 + 0.3).view(shape)
    for axis, dim in cuts:
        if ranks is not None:
            weights = ranks.shard(weights, axis, dim)
    return (weights * (value if SUM in placement.values() else value + value.square() / 2)).sum()


def _loss(subject: Subject, outputs: Any, batch: Any, ranks: Ranks | None) -> tuple[torch.Tensor, bool]:
    """Return the loss of a batch, and True if it is the subject's own."""
    loss = subject.loss(outputs, batch)
    if loss is not None:
        return loss, True
    terms = []
    for name, value in named(outputs).items():
        placement = subject.placement(name)
        if placement is not None and value.requires_grad:
            terms.append(_projection(_plain(value), placement, ranks))
    if not terms:
        raise ValueError("no output of the module requires a gradient: override `loss` or `forward`")
    return torch.stack(terms).sum(), False


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a DTensor as a full tensor, any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _reference(subject: Subject, case: Case) -> Reference:
    """Run the dense module on all parts of the data."""
    model, found = _dense(subject, case), Reference()
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = subject.optimizer(model)
    for name, param in params.items():
        found.values["weight", -1, -1, name] = param.detach().clone()
    first_norm = 0.0
    for step, microbatches in enumerate(_batches(subject, case)):
        # 1. The loss of every microbatch and part by itself, with its gradient.
        counts = found.counts.setdefault(step, {})
        partial: dict[str, dict[tuple[int, int], torch.Tensor]] = {name: {} for name in params}
        for microbatch, parts in enumerate(microbatches):
            for part, batch in enumerate(parts):
                for name, value in named(batch, "input").items():
                    found.inputs.setdefault(("input", step, microbatch, name), []).append(value)
                outputs = subject.forward(model, batch)
                loss, own = _loss(subject, outputs, batch, None)
                values = {**named(outputs), **({"loss": loss} if own else {})}
                for name, value in values.items():
                    key = ("output", step, microbatch, name)
                    found.outputs.setdefault(key, []).append(value.detach().clone())
                counts[microbatch, part] = float(subject.count(batch))
                grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
                for (name, param), grad in zip(params.items(), grads, strict=True):
                    given = torch.zeros_like(param) if grad is None else grad
                    partial[name][microbatch, part] = given.detach().clone()
        # 2. The step's gradient is their sum over the count of all.
        total = sum(counts.values()) or 1.0
        for name, param in params.items():
            param.grad = torch.stack(list(partial[name].values())).sum(0) / total
            found.values["gradient", step, -1, name] = param.grad.clone()
            found.partial[step, name] = partial[name]
        # 3. Norm, clipping, update.
        norm = math.sqrt(sum(float(found.values["gradient", step, -1, name].pow(2).sum()) for name in params))
        found.values["norm", step, -1, "gradient norm"] = torch.tensor(norm, dtype=torch.float64)
        first_norm = first_norm or norm
        if case.clip and subject.clips:
            _scale(subject, model, norm, first_norm / 2)
        optimizer.step()
        for name, param in params.items():
            found.values["weight", step, -1, name] = param.detach().clone()
    return found


def _scale(subject: Subject, model: nn.Module, norm: float, largest: float) -> None:
    """Scale gradients of a global norm of `norm` to `largest` at most."""
    for param in model.parameters():
        grad = subject.gradient(param)
        if grad is not None and norm > largest:
            grad.mul_(largest / norm)


def _parallel(
    subject: Subject, reference: Reference, ranks: Ranks, watch: bool
) -> tuple[Record, tuple[str, ...]]:
    """Run the parallel module on this rank's part of the data; return results and overwritten tensors."""
    case, found = ranks.case, Record()
    dense = _dense(subject, case)
    batches = _batches(subject, case)
    with poisoned_memory() if case.poison else nullcontext():
        model = subject.parallel(dense, ranks).double()
        saved = SavedTensors(model.buffers()) if watch else None
        optimizer = subject.optimizer(model)
        part = case.data_index(ranks.rank, subject.data_axes)
        for step, microbatches in enumerate(batches):
            optimizer.zero_grad()
            local = [parts[part] for parts in microbatches]
            divisor = subject.divisor(sum(subject.count(batch) for batch in local), ranks)
            # 1. Forward and backward of every microbatch.
            for microbatch, batch in enumerate(local):
                with saved or nullcontext():
                    outputs = subject.forward(model, batch)
                    loss, own = _loss(subject, outputs, batch, ranks)
                for name, value in {**named(outputs), **({"loss": loss} if own else {})}.items():
                    placement = subject.placement(name)
                    if placement is not None:
                        found["output", step, microbatch, name] = (_plain(value.detach()).clone(), placement)
                (loss / (divisor or 1.0)).backward()
            # 2. Gradients as the optimizer will see them.
            subject.synchronize(model, ranks)
            params = {
                name: param
                for local_name, param in model.named_parameters()
                if param.requires_grad
                and subject.placement(name := subject.dense_name(local_name, ranks)) is not None
            }
            for name, param in params.items():
                grad = subject.gradient(param)
                given = torch.zeros_like(param) if grad is None else grad
                full, placement = subject.full(name, given.detach(), param, ranks)
                found["gradient", step, -1, name] = (full.clone(), placement)
            # 3. Norm, clipping, update.
            norm = subject.norm(model, ranks)
            if norm is not None:
                value = _plain(torch.as_tensor(norm, dtype=torch.float64).detach())
                found["norm", step, -1, "gradient norm"] = (value.clone(), {})
                if case.clip:
                    largest = float(reference.values["norm", 0, -1, "gradient norm"]) / 2
                    _scale(subject, model, float(value), largest)
            optimizer.step()
            for name, param in params.items():
                full, placement = subject.full(name, param.detach(), param, ranks)
                found["weight", step, -1, name] = (full.clone(), placement)
    return found, () if saved is None else tuple(saved.overwritten)
