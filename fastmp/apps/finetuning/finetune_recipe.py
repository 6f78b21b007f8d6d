"""The recipe of fine-tuning: a TOML file in configs/finetune/, under options of the command line.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastmp.apps.finetuning.finetune_tasks import TASKS
from fastmp.apps.finetuning.selection import Point
from fastmp.config import (
    CheckpointConfig,
    DataConfig,
    GPTConfig,
    MaskedLMConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.config.options import Checked, option
from fastmp.config.recipe import load_as

__all__ = ["FinetuneConfig", "FinetuneRecipe", "load_finetune", "run_recipe"]


@dataclass(frozen=True)
class FinetuneConfig(Checked):
    """The runs of a task: their data, how they are trained, and how many seeds the median is of."""

    path: str = option("", "directory with the task's files as they are published")
    init_from: str = option(
        "",
        "begin with the weights of a BERT: a checkpoint, the latest one of a run, or a transformers model; "
        "none: at random",
    )
    tokenizer: str | None = option(
        None, "tokenizer of the model: byte, a tokenizer.json, or its directory; none: that of init_from"
    )
    seq_len: int = option(512, "tokens of a row; longer texts are cut, long contexts go into several rows")
    stride: int = option(128, "tokens between the beginnings of two windows of a long context")
    max_answer_length: int = option(30, "most tokens of an answer")
    micro_batch_size: int = option(8, "samples of a microbatch on one rank")
    batch_size: int = option(32, "samples of a step, over all ranks (that of the task)")
    epochs: int = option(3, "how often a run sees every sample (that of the task)")
    warmup: float = option(0.06, "share of the steps in which the learning rate grows")
    seeds: int = option(5, "runs, of which the median is reported")
    seed: int = option(
        1234, "seed of the first run's head, dropout and order of samples; the next ones follow"
    )
    dtype: str = option(
        "auto",
        "dtype of the parameters; auto: bfloat16 on a GPU, else float32; float16 scales the loss",
        ("auto", "float32", "bfloat16", "float16"),
    )
    name: str = option("", "name of all runs together, and of their directory (that of the task)")
    run_dir: str = option("runs", "directory of all names")
    log_interval: int = option(50, "steps between two lines of the log")
    save_interval: int = option(1000, "steps between two checkpoints; one more at the end; 0: none")
    stall_seconds: float = option(300.0, "no progress for so long ends the job with a hang report; 0: never")

    def _problems(self) -> Iterator[str]:
        yield from self._not_positive("seq_len", "stride", "max_answer_length", "micro_batch_size")
        yield from self._not_positive("batch_size", "epochs", "seeds", "log_interval")
        yield from self._negative("save_interval", "stall_seconds")
        if not 0.0 <= self.warmup <= 1.0:
            yield f"warmup must be from 0 to 1, got {self.warmup}"
        if self.name in (".", "..") or "/" in self.name:
            yield f"name must be the name of a directory, got {self.name!r}"


@dataclass(frozen=True)
class FinetuneRecipe:
    """Fine-tuning for one task, as a file in `configs/finetune/` describes it.

    model: None: that of `finetune.init_from`, which it otherwise must equal but for dropout.
    """

    model: GPTConfig | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def point(self) -> Point:
        """Return the batch size and learning rate of a recipe without --grid."""
        return Point(self.finetune.batch_size, self.optimizer.lr)


def load_finetune(task: str, path: str | Path | None, options: Mapping[str, Any]) -> FinetuneRecipe:
    """Return the recipe of `task` from the file `path`, if any, overridden by `options`.

    What neither says is Table 6's, for the smallest model, with a linear decay to 0 and the averages of Adam
    that Devlin et al. 2018 have. ValueError as `load_recipe`, and for a number of warm-up steps: here it is a
    share.
    """
    first = TASKS[task].grid[0]
    defaults = {
        "optimizer": {
            **{"lr": first.lr, "min_lr": 0.0, "schedule": "linear", "warmup_steps": 0},
            **{"betas": [0.9, 0.999], "eps": 1e-6},
        },
        "finetune": {"batch_size": first.batch_size, "epochs": TASKS[task].epochs, "name": task},
    }
    recipe = load_as(FinetuneRecipe, path, options, **defaults)
    if recipe.optimizer.warmup_steps:
        raise ValueError(
            f"optimizer.warmup_steps {recipe.optimizer.warmup_steps}: the number of steps follows from the "
            "data; give their share, finetune.warmup"
        )
    if not recipe.finetune.path:
        raise ValueError(
            "there are no data: give finetune.path (--data DIR), the directory of the task's files"
        )
    if recipe.parallel.cp > 1:
        raise ValueError(
            f"parallel.cp is {recipe.parallel.cp}: the sequence of a BERT is not divided over ranks"
        )
    if recipe.model is None and not recipe.finetune.init_from:
        raise ValueError("there is no model: give finetune.init_from (--init-from PATH), or a table [model]")
    return recipe


def run_recipe(recipe: FinetuneRecipe, model: GPTConfig, point: Point, seed: int, steps: int) -> Recipe:
    """Return the trainer's recipe of one run of `steps`."""
    given = recipe.finetune
    rows = DataConfig(  # of two parts, with padding, as those of masked samples are
        seq_len=given.seq_len, micro_batch_size=given.micro_batch_size, seed=seed, masked_lm=MaskedLMConfig()
    )
    return Recipe(
        model=model,
        parallel=recipe.parallel,
        data=rows,
        optimizer=replace(recipe.optimizer, lr=point.lr, warmup_steps=round(given.warmup * steps)),
        train=TrainConfig(
            steps=steps,
            global_batch_size=point.batch_size,
            dtype=given.dtype,
            seed=seed,
            log_interval=given.log_interval,
            eval_interval=0,
            name=f"{point}-seed{seed}",
            run_dir=str(Path(given.run_dir) / given.name),
            stall_seconds=given.stall_seconds,
        ),
        checkpoint=CheckpointConfig(interval=given.save_interval, keep=1),
    )
