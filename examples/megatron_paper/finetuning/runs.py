"""Runs of a fine-tuning job: train a model with the task's head, evaluate it and write the result.

A run that was interrupted goes on from its latest checkpoint; one that has ended is read from its result.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from examples.megatron_paper.finetuning.finetune_recipe import FinetuneRecipe, run_recipe
from examples.megatron_paper.finetuning.finetune_tasks import TASKS
from examples.megatron_paper.finetuning.losses import model_and_loss, score_samples
from examples.megatron_paper.finetuning.predictions import evaluate_classes, evaluate_questions
from examples.megatron_paper.finetuning.results import FinetuneResult, read_result, write_json
from examples.megatron_paper.finetuning.samples import TaskData
from examples.megatron_paper.finetuning.selection import Point
from examples.megatron_paper.finetuning.splits import Prepared, Split
from fastmp.config import GPTConfig, Recipe
from fastmp.config.sizes import flops_per_token
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.distributed.runtime import Runtime
from fastmp.nn.bert_tasks import BertForTask, pretrained_name
from fastmp.training.checkpoint.model_weights import load_weights
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.metrics import RunInfo, TrainLog
from fastmp.training.microbatches import PipelineLoss
from fastmp.training.stopping import StopRequests
from fastmp.training.trainer import DTYPES, Trainer
from fastmp.watchdog.watchdog import watch

__all__ = ["Runs", "on_first"]

T = TypeVar("T")
Metrics = dict[str, float]


@dataclass(frozen=True)
class Runs:
    """The runs of a task: what they share. All ranks make it, and call `result`, together.

    reader: of the weights to begin with; None: they are drawn. directory: the one that runs have theirs in.
    """

    task: str
    recipe: FinetuneRecipe
    model: GPTConfig
    reader: CheckpointReader | None
    prepared: Prepared
    groups: ParallelGroups
    runtime: Runtime
    directory: Path

    def result(self, point: Point, seed: int) -> FinetuneResult | None:
        """Return the result of a run, training it if there is none yet; None if a signal stopped it."""
        data = self._data(point, seed)
        recipe = run_recipe(self.recipe, self.model, point, seed, data.steps)
        path = self.directory / recipe.train.name / "result.json"
        metric = TASKS[self.task].metric
        found = on_first(self.runtime, lambda: read_result(path, point, seed, metric))
        if found is not None:
            return found
        run = _Run(self, recipe, data, *self._trainer(recipe, data))
        try:
            ended, diverged = run.train()
            metrics = run.finish() if ended and not diverged else None
        finally:
            run.trainer.close()
        if not ended:
            return None
        if self.runtime.rank == 0:
            write_json(path, {"point": asdict(point), "seed": seed, "metrics": metrics})
        del run
        gc.collect()  # modules and their hooks refer to each other; the next run needs the memory
        return FinetuneResult(point, seed, metrics)

    def _data(self, point: Point, seed: int) -> TaskData:
        given = self.recipe.finetune
        return TaskData(
            self.prepared.train,
            self.prepared.dev.samples,
            special=self.prepared.special,
            seq_len=given.seq_len,
            micro_batch_size=given.micro_batch_size,
            batch_size=point.batch_size,
            epochs=given.epochs,
            seed=seed,
        )

    def _trainer(self, recipe: Recipe, data: TaskData) -> tuple[Trainer, list[BertForTask]]:
        task, device, seed = TASKS[self.task], self.runtime.device, recipe.train.seed
        tp_rank = group_rank(self.groups.tp)
        rng = RngTracker(seed, device=device, tp_rank=tp_rank)
        auto = torch.bfloat16 if device.type == "cuda" else torch.float32
        chunks, loss = model_and_loss(
            self.model,
            self.groups,
            recipe.parallel,
            head=task.head,
            num_outputs=task.num_outputs,
            rng=rng,
            device=device,
            dtype=DTYPES.get(recipe.train.dtype, auto),
        )
        if isinstance(loss, PipelineLoss):  # what is drawn from now on differs from stage to stage
            pp_rank = group_rank(self.groups.pp)
            rng.follow(RngTracker(seed, device=device, pp_rank=pp_rank, tp_rank=tp_rank))
        if self.reader is not None:
            load_weights(self.reader, self.model, chunks, self.groups, name_of=self._saved_as)
        trainer = Trainer(
            chunks if isinstance(loss, PipelineLoss) else chunks[0],
            data,
            loss,
            recipe.train,
            optimizer=recipe.optimizer,
            checkpoint=recipe.checkpoint,
            groups=self.groups,
            rng=rng,
            device=device,
        )
        return trainer, chunks

    def _saved_as(self, name: str) -> str | None:
        """Return the name of a parameter in the checkpoint of a Bert, which may have no pooler."""
        assert self.model.bert is not None
        if name.startswith("task_head.") and not self.model.bert.sentence_order:
            return None
        return pretrained_name(name)


@dataclass(frozen=True)
class _Run:
    """A run in progress."""

    of: Runs
    recipe: Recipe
    data: TaskData
    trainer: Trainer
    chunks: list[BertForTask]

    @property
    def directory(self) -> Path:
        return self.of.directory / self.recipe.train.name

    def train(self) -> tuple[bool, bool]:
        """Train to the last step. Returns True if no signal stopped it, and True if it diverged."""
        loaded, runtime, name = self.trainer.resume(), self.of.runtime, self.recipe.train.name
        info = RunInfo(
            total_steps=self.recipe.train.steps,
            tokens_per_step=self.data.batch_size * self.of.prepared.rows * self.data.seq_len,
            flops_per_token=flops_per_token(self.of.model, self.data.seq_len),
            device=str(runtime.device),
            world_size=runtime.world_size,
        )
        interval, diverged = self.recipe.train.log_interval, False
        stop = StopRequests(runtime.rank, runtime.world_size)
        with TrainLog(
            self.directory, info, log_interval=interval, start_step=self.trainer.step, rank=runtime.rank
        ) as log:
            log.note(f"{name}: " + ("step 0" if loaded is None else f"going on after step {loaded.step}"))
            seconds = self.recipe.train.stall_seconds
            with stop, watch(self.directory / "hang", self.of.runtime, seconds, note=log.note):
                try:
                    self.trainer.train(log, before_step=lambda step: self._after_epoch(step, log), stop=stop)
                except FloatingPointError as error:  # on all ranks: no peer is lost
                    log.note(f"{name} diverged: {error}")
                    diverged = True
            if stop.reason:
                log.note(f"stopped after step {self.trainer.step} ({stop.reason}); the same command goes on")
        return not stop.reason, diverged

    def _after_epoch(self, step: int, log: TrainLog) -> None:
        """Record the metrics after `step` steps, at the end of each epoch but the last."""
        epoch = self.data.epochs_done(step)
        if not step or epoch in (self.data.epochs_done(step - 1), self.data.epochs):
            return
        metrics, _ = self._evaluate(self.of.prepared.dev)
        if metrics is not None:
            log.record("dev", step, **metrics)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            log.note(f"epoch {epoch}/{self.data.epochs}: {shown}")

    def finish(self) -> Metrics:
        """Return the metrics of all splits on all ranks; rank 0 writes the predictions."""
        found, predictions = self._evaluate(self.of.prepared.dev)
        for split in self.of.prepared.also:
            more, _ = self._evaluate(split)
            if found is not None and more is not None:
                found |= {f"{split.name}_{key}": value for key, value in more.items()}
        if self.of.runtime.rank == 0:
            write_json(self.directory / "predictions.json", predictions)
        metrics = on_first(self.of.runtime, lambda: found)
        assert metrics is not None, "the first rank has them"
        return metrics

    def _evaluate(self, split: Split) -> tuple[Metrics | None, Any]:
        """Return the metrics and predictions of a split on rank 0; None on the others."""
        self.trainer.optimizer.gather.wait()
        trainer, schedule = self.trainer, self.recipe.parallel.schedule
        samples, groups = split.samples, self.of.groups
        scores = score_samples(self.chunks, self.data, samples, groups, trainer.device, schedule)
        if scores is None:
            return None, None
        if not split.windows:
            return evaluate_classes(split.examples, scores)
        return evaluate_questions(
            split.examples,
            split.windows,
            scores,
            max_length=self.of.recipe.finetune.max_answer_length,
            impossible=self.of.task == "squad2",
        )


def on_first(runtime: Runtime, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on all ranks; its ValueError or OSError is raised on all
    ranks.
    """
    if runtime.world_size == 1:
        return work()
    told: list[Any] = [None, None]
    if runtime.rank == 0:
        try:
            told[0] = work()
        except (ValueError, OSError) as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise ValueError(told[1])
    result: T = told[0]
    return result
