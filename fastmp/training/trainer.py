"""The training loop, for any torch module: parallel models of fastmp and plain ones, also pipelines.

A step (`train_step.py`) runs its microbatches, sums gradients and token counts over the data-parallel ranks,
and divides by the number of tokens: an exact mean over the tokens of the global batch, for any layout and any
number of tokens in a microbatch. No step waits for the device; numbers are read when a log line is due.

A model with experts also has auxiliary losses, which are minimised but not reported as the loss, and the
counts of tokens of each expert, from which routers update their biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastmp.config import CheckpointConfig, GraphConfig, OptimizerConfig, TrainConfig
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.collectives import gather_objects, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.overlap import OverlappedLayers
from fastmp.optim.from_config import make_grads, make_optimizer, make_scaler
from fastmp.optim.lr_schedule import learning_rates
from fastmp.optim.named_params import named_parameters
from fastmp.pipeline.runner import PipelineError
from fastmp.profiling import traced
from fastmp.status import process_status
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.training.checkpoint.checkpointer import Loaded
from fastmp.training.checkpoint_scheduler import CheckpointScheduler, paused
from fastmp.training.graphing import (
    evaluation_graphs,
    layers_of,
)
from fastmp.training.microbatches import (
    Batch,
    ExpertStats,
    LossFunction,
    MicrobatchRunner,
    PipelineLoss,
    TrainData,
)
from fastmp.training.replicas import Replicas, make_equal
from fastmp.training.stash_attachment import attach_stash
from fastmp.training.step_counters import StepCounters
from fastmp.training.step_execution import StepExecution
from fastmp.training.stopping import REASONS, SkippedSteps, StopRequests
from fastmp.training.train_step import ExpertWindow, TrainStep
from fastmp.training.validation import Evaluation, evaluate

if TYPE_CHECKING:
    from fastmp.distributed.rng import RngTracker
    from fastmp.optim.optimizer import ParameterGroup
    from fastmp.training.metrics import TrainLog

__all__ = ["ExpertStats", "StepResult", "Trainer"]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """The numbers of one step, 0-dim tensors on the device: reading one waits for the step.

    Attributes:
        loss: the mean over the `num_tokens` tokens of the global batch.
        grad_norm: before clipping, float64. The step was skipped if it is not finite.
        lr: the learning rate of the update, float64; the step after a skipped one has the same.
        mtp_loss: the weighted loss of multi-token prediction per token, which `loss` does not include; 0
            without MTP modules.
        aux_loss: with experts, their auxiliary losses per token, which `loss` does not include.
        expert_counts: with experts, (layers, experts) int64, the tokens of the global batch.
        dropped_pairs: with experts, the (token, expert) assignments that were dropped because they did not
            fit into symmetric memory (`model.moe.symmetric_capacity`).
    """

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor
    lr: Tensor
    mtp_loss: Tensor
    aux_loss: Tensor | None = None
    expert_counts: Tensor | None = None
    dropped_pairs: Tensor | None = None


class Trainer:
    """Train `model` on `data`: call `train()` for a whole run, or `train_step()` for single steps.

    A `config.dtype` other than "auto" casts the model first. The loss of float16 parameters is scaled by
    `scaler`, a `LossScaler` whose state is in checkpoints.

    Args:
        model: any module; under tensor parallelism, one made for `groups`; in a pipeline, this rank's chunks
            (see `Pipeline`). Replicas get the parameters of the first data-parallel rank.
        data: see `TrainData`, for example a `fastmp.training.TokenDataset`.
        loss_fn: (model, batch on the device) -> (sum of the losses of the batch's tokens, number of tokens),
            0-dim tensors. Do not take the mean: the trainer divides by the tokens of all batches. A model
            with experts returns an `ExpertStats`, too; after the optimizer step, modules with a method
            `update_expert_bias(counts (experts,))` are called in the order of its rows, with the counts of
            the global batch (zeros after a skipped step). For a pipeline, a `PipelineLoss`.
        config, optimizer: the training loop, and the optimizer with its learning rates and clipping.
        checkpoint: when to save, and which checkpoints to keep.
        parameter_group: (name, parameter) -> its group, with a learning rate and weight decay; None: weight
            decay for matrices, none for vectors.
        groups: this rank's process groups.
        rng: random streams, saved in checkpoints; None: torch's default generators.
        device: the device to move the model to; None: its own. A GPU becomes the current device.
        graphs: CUDA graphs of layers, of microbatches (scope "full") or of steps ("full_step"); None: no
            graphs. If capturing a layer or microbatch fails on a rank, all ranks run eagerly. With
            `evaluation`, validation forwards are graphs, too.
        graph_manager: makes the manager for another library in `graphs.impl`, see `make_graphs`.
        overlap_experts: EP communication overlap: the all-to-all of a microbatch runs while another one
            computes; see `fastmp.nn.overlap`.
        after_save: called with each checkpoint, see `Checkpointer`.

    Raises:
        ValueError: microbatches and ranks do not divide `config.global_batch_size`, no rank has a parameter
            to train, a tied table is frozen on one of its stages only, a module's `check_training()` raises
            (a router without a gradient), or as `MicrobatchRunner`.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        data: TrainData,
        loss_fn: LossFunction | PipelineLoss,
        config: TrainConfig,
        *,
        optimizer: OptimizerConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        parameter_group: Callable[[str, nn.Parameter], ParameterGroup] | None = None,
        groups: ParallelGroups = ParallelGroups.alone(),
        rng: RngTracker | None = None,
        device: torch.device | str | None = None,
        graphs: GraphConfig | None = None,
        graph_manager: Callable[..., GraphManager] | None = None,
        overlap_experts: bool = False,
        after_save: Callable[[Path, int], str] | None = None,
    ) -> None:
        dtype = DTYPES.get(config.dtype)
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        self.model = model if isinstance(model, nn.Module) else nn.ModuleList(chunks)
        for module in self.model.modules():
            if callable(check := getattr(module, "check_training", None)):
                check()
        first = next(self.model.parameters(), None)
        chosen = torch.device(device) if device is not None else None if first is None else first.device
        if chosen is not None and chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)  # captures and kernels are on the current device
        if device is not None or dtype is not None:
            self.model.to(device=device, dtype=dtype)
        self.model.train()
        self.data, self.config, self.groups, self.rng = data, config, groups, rng
        self.optimizer_config = OptimizerConfig() if optimizer is None else optimizer
        self.num_microbatches = self._count_microbatches()
        self.runner = self._make_runner(chunks, loss_fn, overlap_experts)
        attach_stash(self.runner, groups)
        self.device = self.runner.pipeline.device
        trained = _trained_dtypes(self.runner.chunks, groups)
        make_equal([*self.model.parameters(), *self.model.buffers()], groups)
        self.grads = make_grads(self.runner.chunks, self.optimizer_config, groups)
        self.optimizer = make_optimizer(self.grads, self.optimizer_config, groups, parameter_group)
        if self.optimizer_config.overlap:
            self.optimizer.gather.attach(self.runner.chunks)
        self.scaler = make_scaler(self.optimizer_config, self.device) if torch.float16 in trained else None
        work = TrainStep(
            self.runner,
            self.grads,
            self.optimizer,
            self.scaler,
            groups,
            [m for m in self.model.modules() if callable(getattr(m, "update_expert_bias", None))],
            StepCounters(chunks, groups),
            self.optimizer_config.clip_grad_norm,
            torch.tensor(
                learning_rates(self.optimizer_config, config.steps), dtype=torch.float64, device=self.device
            ),
            torch.zeros(len(REASONS), dtype=torch.float64, device=self.device),
        )
        graphs = GraphConfig() if graphs is None else graphs
        self._steps = StepExecution(
            work,
            graphs,
            graph_manager,
            rng=rng,
            device=self.device,
            span_size=self.optimizer_config.bucket_size if self.grads.communicates else None,
        )
        self.graphs = self._steps.graphs
        self.evaluation_graphs = (
            evaluation_graphs(self.runner, groups, rng=rng, device=self.device)
            if graphs.enabled and graphs.evaluation
            else None
        )
        self._window: ExpertWindow | None = None  # what experts did since the last line of the log
        self._replicas: Replicas | None = None
        self._stop = StopRequests()
        self._skipped = SkippedSteps(self.grads, groups.grid.world_size, self.optimizer.gather.wait)
        self.saving = CheckpointScheduler(
            Path(config.run_dir) / config.name / "checkpoints",
            CheckpointConfig() if checkpoint is None else checkpoint,
            self.runner.chunks,
            self.grads,
            self.optimizer,
            groups=groups,
            scaler=self.scaler,
            rng=rng,
            device=self.device,
            placement=self.runner.placement,
            after=after_save,
        )
        self.step = 0

    def train(
        self,
        log: TrainLog | None = None,
        *,
        before_step: Callable[[int], None] | None = None,
        stop: StopRequests | None = None,
    ) -> Evaluation | None:
        """Train from `self.step` to `config.steps`, reporting to `log`.

        Args:
            before_step: called with the number of steps done, before each step and after the last one. The
                all-gather of parameters may be running: call `optimizer.gather.wait()` before reading them.
            stop: asked in each step. Once any rank has been asked to stop, all ranks save the step they have
                done (on a GPU the next one) and return.

        Returns:
            the last evaluation, over all held-out data; None without one or if the run was stopped.

        Raises:
            FloatingPointError: on all ranks, after `config.max_skipped_steps` consecutive steps with a
                non-finite gradient.
            ReplicaError: as `check_replicas`.
        """
        config, evaluation = self.config, None
        self._read_skipped(log, all_steps=True)  # of steps before, which may have been told to stop
        self._stop, self._skipped.stop_reason = StopRequests() if stop is None else stop, ""
        self._steps.work.requests.zero_()
        while self.step < config.steps:
            if before_step is not None:
                self.saving.before_change()
                before_step(self.step)
            before = self._graph_state()
            result = self._train_step()
            if self.graphs is not None and log is not None and self._graph_state() != before:
                log.note(f"step {self.step}: {self.graphs.describe()}")
            if log is not None and self._steps.rerun.note:
                log.note(f"step {self.step}: {self._steps.rerun.note}")
            if log is not None:
                log.progress(self.step)
            if log is not None and log.due(self.step):
                self._log_step(log, result)
            self._read_skipped(log)
            if _due(self.step, config.check_replicas):
                self.check_replicas()
            if _due(self.step, config.eval_interval) and self.step < config.steps:
                self.evaluate(log, max_batches=config.eval_batches)
            self.saving.after_step(self.step, log)
            if self._stops(log):
                return None
        self.optimizer.gather.wait()
        self._read_skipped(log, all_steps=True)
        if self._stops(log):
            return None
        if before_step is not None:
            self.saving.before_change()
            before_step(self.step)
        if config.eval_interval:
            evaluation = self.evaluate(log)
        self.saving.end(self.step, log, save=self.saving.config.interval > 0)
        return evaluation

    def check_replicas(self) -> None:
        """Compare replicated tensors bit for bit; all ranks call it, and wait for the step. See `Replicas`.

        Raises:
            ReplicaError: on all ranks, naming the rank and the tensor that differ.
        """
        if self.groups.grid.world_size > 1:
            self.optimizer.gather.wait()
            if self._replicas is None:
                self._replicas = Replicas(self.runner.chunks, self.grads, self.groups)
            self._replicas.check(self.step)

    def close(self) -> None:
        """Remove the graphs and wait for the last save; later steps run eagerly.

        Graphs of collectives hold on to communicators, and `Runtime.close` would wait for them.
        """
        for graphs in (self.graphs, self.evaluation_graphs):
            if graphs is not None:
                graphs.remove()
        self.saving.checkpointer.close()

    def train_step(self) -> StepResult:
        """Run one optimizer step on the next global batch; the host queues work and does not wait for it.

        Errors name the step: a `PipelineError` in its message, any other error in a note.
        """
        result = self._train_step()
        self.optimizer.gather.wait()  # the caller may read parameters next
        return result

    def _train_step(self) -> StepResult:
        """Run a step; parameters are gathered while the next one runs."""
        process_status.step = self.step + 1
        with _step_named(process_status.step):
            return self._run_step()

    def _run_step(self) -> StepResult:
        numbers = self._steps.run(self._fetch, self._note_requests, self.saving.before_change)
        self.step += 1
        self._skipped.add(self.step, numbers.skipped, numbers.ends_run, numbers.requests)
        if numbers.expert_counts is not None:
            window = self._window or ExpertWindow()
            self._window = window.add(numbers)
        return StepResult(
            *(numbers.loss, numbers.grad_norm, numbers.num_tokens, numbers.lr, numbers.mtp_loss),
            *(numbers.aux_loss, numbers.expert_counts, numbers.dropped_pairs),
        )

    def _note_requests(self) -> None:
        """Put this rank's request to stop into the sums of this step, which all ranks get."""
        if wanted := self._stop.wanted():
            self._steps.work.requests[REASONS.index(wanted)] = 1.0

    def _stops(self, log: TrainLog | None) -> bool:
        """Save the step and return True if a rank was asked to stop in a step that has been read."""
        self._stop.reason = self._skipped.stop_reason
        if self._stop.reason:
            self.saving.end(self.step, log, save=True)
        return bool(self._stop.reason)

    def _graph_state(self) -> tuple[int, str | None]:
        """Return (number of captured graphs, the reason why there will be none, or None)."""
        return (0, None) if self.graphs is None else (self.graphs.num_graphs, self.graphs.failure)

    @traced("fastmp.training.eval")
    def evaluate(self, log: TrainLog | None = None, *, max_batches: int | None = None) -> Evaluation:
        """Return the loss on the held-out data (its first `max_batches` batches), and report it to `log`."""
        process_status.phase = "evaluate"
        self.optimizer.gather.wait()  # evaluation may use parameters otherwise than training
        with paused(log, self.device):
            evaluation = evaluate(
                self.runner, self.data, groups=self.groups, device=self.device, max_batches=max_batches
            )
        if log is not None:
            log.evaluation(
                self.step,
                loss=evaluation.loss,
                loss_per_byte=evaluation.loss_per_byte,
                unigram_entropy=evaluation.unigram_entropy,
                source_losses=evaluation.source_losses,
            )
        return evaluation

    def save(self) -> Path:
        """Write a checkpoint of all state that the next step depends on; return its directory."""
        return self.saving.save(self.step)

    def resume(self, path: str | Path | None = None) -> Loaded | None:
        """Continue from the latest checkpoint of this run, or from the one at `path`; None if there is none.

        The checkpoint may have been saved with another layout. With the same layout the next steps are
        bitwise those of the run that saved it; with another one, random streams restart.

        Raises CheckpointError for a checkpoint of another model.
        """
        loaded = self.saving.load(path)
        if loaded is not None:
            self.step = loaded.step
        return loaded

    def _count_microbatches(self) -> int:
        dp_size = group_size(self.groups.dp)
        per_microbatch = self.data.micro_batch_size * dp_size
        if self.config.global_batch_size % per_microbatch:
            raise ValueError(
                f"Trainer: global_batch_size {self.config.global_batch_size} is not divisible by "
                f"micro_batch_size {self.data.micro_batch_size} x {dp_size} data-parallel ranks"
            )
        return self.config.global_batch_size // per_microbatch

    def _make_runner(
        self, chunks: list[nn.Module], loss_fn: LossFunction | PipelineLoss, overlap_experts: bool
    ) -> MicrobatchRunner:
        overlap: OverlappedLayers | None = None
        if overlap_experts:
            needed = "overlap_experts needs a model whose layers are a LayerChain"
            overlap = OverlappedLayers([chains[0] for chains in layers_of(chunks, needed)])
        if not isinstance(loss_fn, PipelineLoss):
            if (pp_size := group_size(self.groups.pp)) > 1:
                raise ValueError(
                    f"Trainer: a pipeline of {pp_size} ranks needs chunks and a PipelineLoss, got "
                    f"{type(self.model).__name__} and {type(loss_fn).__name__}"
                )
            if overlap is not None and not overlap.exchanges:
                raise ValueError(
                    "Trainer: overlap_experts has no exchange to overlap: no layer sends rows to other ranks"
                )
            chunks = [self.model]
        return MicrobatchRunner(
            chunks, loss_fn, groups=self.groups, num_microbatches=self.num_microbatches, overlap=overlap
        )

    def _fetch(self, microbatch: int) -> Batch:
        dp_rank, dp_size = group_rank(self.groups.dp), group_size(self.groups.dp)
        return self._to_device(
            self.data.batch(self.step, microbatch, self.num_microbatches, dp_rank, dp_size)
        )

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cuda":  # a copy from pageable memory would wait
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def _log_step(self, log: TrainLog, result: StepResult) -> None:
        window, self._window = self._window, None
        experts = None
        if window is not None:
            mean, stash = window.aux_loss / window.steps, self._steps.work.counters.stash_use()
            experts = window._replace(aux_loss=mean, stash=stash)
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
        log.step(self.step, **numbers, mtp_loss=result.mtp_loss, experts=experts)

    def _read_skipped(self, log: TrainLog | None, *, all_steps: bool = False) -> None:
        """Note skipped steps; raise FloatingPointError after too many in a row."""
        lines, limit = self._skipped.read(all_steps=all_steps), self.config.max_skipped_steps
        if log is not None:
            for line in lines:
                log.note(line)
        if lines and limit and self._skipped.in_a_row >= limit:
            raise FloatingPointError(
                f"Trainer: stopped after step {self.step}: the gradient was not finite in the last "
                f"{self._skipped.in_a_row} steps (train.max_skipped_steps); {lines[-1]}. Go on from the last "
                "checkpoint (--resume auto) with a lower learning rate or other data"
            )


@contextmanager
def _step_named(number: int) -> Iterator[None]:
    try:
        yield
    except PipelineError as error:
        raise PipelineError(f"step {number}, {error}") from error
    except Exception as error:
        error.add_note(f"step {number}")
        raise


def _trained_dtypes(chunks: Sequence[nn.Module], groups: ParallelGroups) -> set[torch.dtype]:
    """Return the dtypes of the trainable parameters of all stages; all pipeline ranks call it.

    A stage may be frozen, but its loss scale, for example, follows from the others.
    """
    own, tied = set[torch.dtype](), set[bool]()
    for _, param in named_parameters(chunks):
        own |= {param.dtype} if param.requires_grad else set()
        tied |= {param.requires_grad} if parallel_attributes(param).pipeline_shared else set()
    everyones = gather_objects((own, tied), groups.pp)
    if not any(trained for trained, _ in everyones):
        raise ValueError(
            "Trainer: expected a parameter to train, but all are frozen on every rank; call requires_grad_() "
            "of some"
        )
    if len(set[bool]().union(*(each for _, each in everyones))) > 1:
        raise ValueError(
            "Trainer: the embedding shared by the first and the last stage is frozen on one of them only; "
            "call requires_grad_(False) on both or on neither"
        )
    return set[torch.dtype]().union(*(trained for trained, _ in everyones))


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
