"""CUDA graphs in training: the manager of a model, and the agreement of ranks on captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fastmp.config import Environment, GraphConfig, set_default_variables
from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.interface import Backend
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.overlapped import OverlappedGraphManager
from fastmp.cuda_graphs.partition import partition
from fastmp.nn.moe.lossless import LosslessForwards
from fastmp.nn.segment import LayerChain
from fastmp.schedule.schedule import Step, followed
from fastmp.training.microbatches import evaluation_mode

if TYPE_CHECKING:
    from fastmp.distributed.groups import ParallelGroups
    from fastmp.distributed.rng import RngTracker
    from fastmp.training.microbatches import MicrobatchRunner
    from fastmp.training.train_step import TrainStep

__all__ = [
    "CaptureAgreement",
    "CheckedStepGraphs",
    "checked_step",
    "evaluation_graphs",
    "layers_of",
    "make_backend",
    "make_graphs",
    "whole_step",
]

_MAX_STEPS = 64  # after which ranks whose graphs are not captured yet are not waited for any more


def make_graphs(
    runner: MicrobatchRunner,
    config: GraphConfig,
    *,
    rng: RngTracker | None,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    span_size: int | None = None,
    manager: Callable[..., GraphManager] | None = None,
) -> GraphManager | None:
    """Return the graph manager for the microbatches of a step; None if graphs are disabled.

    Under scope "full" the graphs hold model chunks and the loss function. Otherwise they hold segments of the
    `LayerChain` of each chunk; with EP communication overlap, compute segments alone.

    Args:
        group: the ranks of a pipeline stage, which verify steps together.
        span_size: the number of parameters after which a captured span ends, see `GraphManager`.
        manager: called as manager(chains, order, rng=, scope=, span_size=, warmup=), not `GraphManager`, for
            capture by another library: `fastmp.cuda_graphs.transformer_engine.TransformerEngineManager`.

    Raises:
        ValueError: a chunk has no chain; the scope names no segment, one that cannot be
            captured, or whole chunks whose communication overlaps; `config.impl` needs a `manager`; or NCCL
            would read memory that torch's allocator has released.
    """
    if not config.enabled:
        return None
    if manager is None and config.impl != "fastmp":
        raise ValueError(f"Trainer: graphs with impl {config.impl!r} need graph_manager=, the manager to use")
    _check_allocator(device)
    scope = config.scope
    options: dict[str, Any] = {"scope": scope, "span_size": span_size, "warmup": config.warmup}
    own: dict[str, Any] = {"verify_every": config.verify_every, "group": group, "fallback": True}
    if runner.overlap is not None:
        if manager is not None or "full" in (scope or ()):
            other = "graph_manager" if manager is not None else f"graphs of scope {scope}"
            raise ValueError(f"Trainer: overlap_experts runs layers in parts, which {other} would run whole")
        backend = make_backend(rng, device)
        return OverlappedGraphManager(runner.overlap, runner.concurrent(), backend=backend, **options, **own)
    if scope is not None and "full" in scope:
        _check_scope(runner.chunks, scope)
        chains, order = runner.full_chains()
        options["scope"] = None
    else:
        needed = "graphs need a model whose layers are a LayerChain, or scope 'full'"
        chains, order = _chains_in_order(layers_of(runner.chunks, needed), runner.order)
    if manager is not None:
        return manager(chains, order, rng=rng, **options)
    return GraphManager(chains, order, backend=make_backend(rng, device), **options, **own)


def whole_step(
    work: TrainStep, config: GraphConfig, *, rng: RngTracker | None, device: torch.device
) -> FunctionGraph:
    """Return the full-iteration graph of the steps of `work`.

    Raises:
        ValueError: a segment cannot be captured, or as `make_graphs` for NCCL.
    """
    return _step_graph(work, work.whole, "the whole step", config, rng, device)


class CheckedStepGraphs:
    """Full-iteration graphs of steps that the host checks in between: up to their sums, and of the update.

    Its interface is that of a `FunctionGraph`, but for two calls instead of one.
    """

    failure: str | None = None

    def __init__(self, reduced: FunctionGraph, updated: FunctionGraph) -> None:
        self.reduced, self.updated = reduced, updated

    @property
    def num_graphs(self) -> int:
        return self.reduced.num_graphs + self.updated.num_graphs

    @property
    def static_bytes(self) -> int:
        return self.reduced.static_bytes + self.updated.static_bytes

    def describe(self) -> str:
        return f"{self.reduced.describe()}; {self.updated.describe()}"

    def recapture(self) -> None:
        """Release the graph of the forwards and backwards; it is captured again by the next steps."""
        self.reduced.recapture()

    def remove(self) -> None:
        self.reduced.remove()
        self.updated.remove()


def checked_step(
    work: TrainStep, config: GraphConfig, *, rng: RngTracker | None, device: torch.device
) -> CheckedStepGraphs:
    """Return the two graphs of the steps of `work`; otherwise as `whole_step`."""
    reduced = _step_graph(work, work.reduced, "the step up to its sums", config, rng, device)
    updated = _step_graph(work, work.updated, "the update", config, rng, device, trains=False)
    return CheckedStepGraphs(reduced, updated)


def _step_graph(
    work: TrainStep,
    function: Callable[..., Any],
    name: str,
    config: GraphConfig,
    rng: RngTracker | None,
    device: torch.device,
    trains: bool = True,
) -> FunctionGraph:
    _check_allocator(device)
    _check_scope(work.runner.chunks, ("full_step",))
    return FunctionGraph(
        function,
        work.runner.chunks,
        backend=make_backend(rng, device),
        name=name,
        advice="scope 'full' captures whole microbatches, and leaves the rest of a step to the host",
        trains=trains,
        warmup=config.warmup,
    )


def evaluation_graphs(
    runner: MicrobatchRunner,
    groups: ParallelGroups,
    *,
    rng: RngTracker | None,
    device: torch.device,
) -> FunctionGraph:
    """Capture the evaluation forward of `runner`, one graph per input signature; return the graphs.

    Experts keep a limited receive capacity; a batch that exceeds it is evaluated again by all-to-all.

    Raises:
        ValueError: a segment cannot be captured, or as `make_graphs` for NCCL.
    """
    _check_allocator(device)
    make = partial(
        FunctionGraph,
        modules=runner.chunks,
        backend=make_backend(rng, device),
        name="the evaluation",
        advice="without graphs.evaluation it runs eagerly",
    )
    with evaluation_mode(runner.chunks):  # in which layers may send tokens otherwise
        graphs, runner.evaluated = LosslessForwards(runner.chunks, groups).graphed(runner.evaluated, make)
    return graphs


def make_backend(rng: RngTracker | None, device: torch.device) -> Backend:
    """Return the graph backend for `device`: CUDA, or a recording one on a CPU."""
    if device.type == "cuda":
        return CudaBackend(rng)
    return RecordingBackend(rng)


def _check_scope(chunks: Sequence[nn.Module], scope: Sequence[str]) -> None:
    for chain in (chain for chunk in chunks for chain in _chains(chunk)):
        partition(chain, scope)


def _check_allocator(device: torch.device) -> None:
    """Disable NCCL's buffer registration for captured collectives, unless NCCL_GRAPH_REGISTER is set.

    Registration synchronises the ranks of a machine on the host. A rank whose capture failed runs the same
    collective eagerly and never joins, so all ranks would hang before they could agree to run without graphs.

    Raises:
        ValueError: NCCL would read memory that torch's allocator has released.
    """
    if device.type == "cuda":
        set_default_variables(NCCL_GRAPH_REGISTER="0")
    environment = Environment.read()
    if device.type == "cuda" and environment.world_size > 1 and environment.registers_segments:
        raise ValueError(
            "Trainer: graphs of collectives and expandable_segments:True for torch's allocator need "
            "NCCL_GRAPH_REGISTER=0: NCCL would read memory that is gone; unset it, and 0 is the default"
        )


class CaptureAgreement:
    """Make all ranks run eagerly if a capture fails on one of them.

    The ranks agree at the end of every step, until all have captured their graphs or one has failed.

    Args:
        group: all ranks that train together, or None; its collectives must also take CPU tensors.
    """

    def __init__(self, manager: GraphManager, group: dist.ProcessGroup | None) -> None:
        self._manager, self._group, self._steps, self._settled = manager, group, 0, group is None
        self._last: tuple[int, str | None] | None = None

    @property
    def state(self) -> tuple[int, str | None]:
        """Return the number of captured graphs, and the reason if there will be none."""
        return self._manager.num_graphs, self._manager.failure

    def restart(self) -> None:
        """Agree again, because graphs are captured again on all ranks."""
        self._steps, self._settled = 0, self._group is None

    def unsettled(self) -> bool:
        """Return True if graphs are being captured or just were: the next step may run differently."""
        before, self._last = self._last, self.state
        return self._manager.pending or before != self._last

    def end_step(self) -> None:
        """End a step of the manager; a failure on any rank then becomes the `failure` of all managers."""
        self._manager.end_step()
        if self._settled:
            return
        self._steps += 1
        failed = self._manager.failure is not None
        state = torch.tensor([failed, self._manager.pending], dtype=torch.int32)
        dist.all_reduce(state, dist.ReduceOp.MAX, group=self._group)
        any_failed, any_pending = state.tolist()
        if any_failed:
            reasons: list[str | None] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(reasons, self._manager.failure, group=self._group)
            rank, reason = next((i, text) for i, text in enumerate(reasons) if text is not None)
            self._manager.give_up(f"rank {rank}: {reason}")
        self._settled = any_failed or not any_pending or self._steps >= _MAX_STEPS


def _chains(chunk: nn.Module) -> list[LayerChain]:
    return [module for module in chunk.modules() if isinstance(module, LayerChain)]


def layers_of(chunks: Sequence[nn.Module], needed: str) -> list[list[LayerChain]]:
    """Return the layer chains of each chunk, in the order in which its forward runs them.

    The first has the layers of the model; those of MTP modules follow. Raises ValueError, saying what is
    `needed`, without one.
    """
    found = [_chains(chunk) for chunk in chunks]
    for chunk, own in zip(chunks, found, strict=True):
        if not own:
            raise ValueError(f"Trainer: {needed}; {type(chunk).__name__} has none")
    return found


def _chains_in_order(
    of_chunks: Sequence[Sequence[LayerChain]], order: Sequence[Step]
) -> tuple[list[LayerChain], Sequence[Step]]:
    """Return the first chains of all chunks, then the others, and the order in which a rank runs them all."""
    chains = [own[0] for own in of_chunks]
    for chunk, own in enumerate(of_chunks):
        before = chunk
        for chain in own[1:]:
            order = tuple(followed(order, before, len(chains)))
            before = len(chains)
            chains.append(chain)
    return chains, order
