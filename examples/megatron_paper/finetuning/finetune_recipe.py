"""The recipe of fine-tuning: a TOML file in configs/finetune/, under options of the command line.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from examples.megatron_paper.finetuning.finetune_tasks import TASKS
from examples.megatron_paper.finetuning.selection import Point
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
from fastmp.config.option_names import DTYPE_ALIASES
from fastmp.config.options import DTYPES, Checked, Problem, option
from fastmp.config.recipe import load_as

__all__ = ["FinetuneConfig", "FinetuneRecipe", "load_finetune", "run_recipe"]


@dataclass(frozen=True)
class FinetuneConfig(Checked):
    """The runs of a task: their data, how they are trained, and how many seeds the median is of."""

    path: str = option("", "directory with the files of the task as they are published; required")
    init_from: str = option(
        "",
        "initialise the weights of the BERT from a checkpoint, a run (its latest checkpoint) or a"
        " Hugging Face model; unset: random",
    )
    tokenizer: str | None = option(
        None, "tokenizer of the model: byte, a tokenizer.json, or its directory; unset: that of init_from"
    )
    seq_len: int = option(
        512, "sequence length in tokens; longer texts are truncated, long contexts become several windows"
    )
    stride: int = option(128, "tokens between the starts of two windows of a long context [document stride]")
    max_answer_length: int = option(30, "longest answer, in tokens")
    micro_batch_size: int = option(8, "samples of a microbatch on one rank")
    batch_size: int = option(32, "samples of an optimizer step, over all ranks; unset: that of the task")
    epochs: int = option(3, "passes over the training samples; unset: that of the task")
    warmup: float = option(0.06, "share of the steps with linear learning rate warm-up [warmup ratio]")
    seeds: int = option(5, "number of runs, each with another seed; the median is reported")
    seed: int = option(
        1234, "seed of the first run (new head, dropout, order of samples); the next runs count up from it"
    )
    dtype: str = option(
        "auto",
        "dtype of parameters and compute; auto: bfloat16 on a GPU, float32 on a CPU; float16 scales the loss",
        DTYPES,
        DTYPE_ALIASES,
    )
    name: str = option("", "name of the runs, and of their directory; unset: that of the task")
    run_dir: str = option("runs", "directory of all runs")
    log_interval: int = option(50, "steps between two lines of the log")
    save_interval: int = option(
        1000, "steps between two checkpoints; the last step is saved too; 0: no checkpoints"
    )
    stall_seconds: float = option(
        300.0,
        "end the job with a hang report after this many seconds without progress; 0: never "
        "[watchdog timeout]",
    )

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("seq_len", "stride", "max_answer_length", "micro_batch_size")
        yield from self._not_positive("batch_size", "epochs", "seeds", "log_interval")
        yield from self._negative("save_interval", "stall_seconds")
        if not 0.0 <= self.warmup <= 1.0:
            yield self._wrong("warmup", "from 0 to 1")
        if self.name in (".", "..") or "/" in self.name:
            yield self._wrong("name", "the name of a directory")


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
