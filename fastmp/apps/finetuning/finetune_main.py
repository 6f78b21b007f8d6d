"""What `fastmp finetune` does on each rank: the task's data, then a run for each point and each seed.

All ranks do the same, but for the files of results, which the first one writes.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastmp.apps.finetuning.data import prepare, vocab_size_of
from fastmp.apps.finetuning.recipe import FinetuneRecipe, run_recipe
from fastmp.apps.finetuning.results import FinetuneResult, check_same, write_results
from fastmp.apps.finetuning.runs import Runs, on_first
from fastmp.apps.finetuning.tasks import TASKS
from fastmp.apps.first_rank import let_rank0_report_first
from fastmp.apps.generation.load import open_either, tokenizer_beside
from fastmp.apps.train_main import claimed
from fastmp.config import Environment, GPTConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.runtime import Runtime, init, main_guard
from fastmp.plan.layout import check_layout, make_grid
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.data.tokenize import Tokenizer, load_tokenizer

__all__ = ["finetune", "run"]


def run(task: str, recipe: FinetuneRecipe, *, grid: bool) -> int:
    """Fine-tune for `task` as this process's whole program; returns the exit status."""

    def job() -> int:
        with let_rank0_report_first(Environment.read().rank or 0):
            runtime = init()
            finetune(task, recipe, runtime, grid=grid)
        runtime.close()
        return 0

    return main_guard(job)


def finetune(
    task: str, recipe: FinetuneRecipe, runtime: Runtime, *, grid: bool = False
) -> list[FinetuneResult]:
    """Do the runs of `task` that have not ended yet, and report all of them; all ranks call it.

    grid: at every point of Table 6, else at that of the recipe. Returns the runs that have ended: fewer than
    there are where a signal has stopped it.

    ValueError, before anything is written, for files that are not the task's, for a model that is no BERT or
    does not fit the tokenizer or the ranks, and where the name is that of another recipe's runs.
    """
    points = TASKS[task].grid if grid else [recipe.point]
    reader, model = _model(recipe, runtime)
    tokenizer = _tokenizer(recipe, reader)
    if not model.vocab_size:
        model = replace(model, vocab_size=vocab_size_of(tokenizer))
    examples = [run_recipe(recipe, model, point, seed=0, steps=1) for point in points]
    for example in examples:
        check_layout(example, runtime.world_size)
    prepared = prepare(task, recipe.finetune, model, tokenizer)
    groups = ParallelGroups.create(make_grid(examples[0], runtime.world_size))
    directory = Path(recipe.finetune.run_dir) / recipe.finetune.name
    on_first(runtime, lambda: check_same(directory / "finetune.json", _identity(task, recipe, model)))
    runs = Runs(task, recipe, model, reader, prepared, groups, runtime, directory)
    seeds = range(recipe.finetune.seed, recipe.finetune.seed + recipe.finetune.seeds)
    results: list[FinetuneResult] = []
    with claimed(directory) if runtime.rank == 0 else nullcontext():
        _say(runtime, *prepared.notes)
        for point, seed in ((point, seed) for point in points for seed in seeds):
            result = runs.result(point, seed)
            if result is None:
                return results
            results.append(result)
            if runtime.rank == 0:
                table = write_results(directory, task, TASKS[task].metric, points, results)
        if runtime.rank == 0:
            _say(runtime, "", f"{table}results in {directory / 'results.json'}")
    return results


def _say(runtime: Runtime, *lines: str) -> None:
    if runtime.rank == 0:
        print("\n".join(lines), flush=True)


def _identity(task: str, recipe: FinetuneRecipe, model: GPTConfig) -> dict[str, Any]:
    """What all runs of one name share; points, seeds, the layout and the log are their own."""
    own = {"batch_size", "micro_batch_size", "seeds", "seed", "name", "run_dir"}
    own |= {"log_interval", "save_interval", "stall_seconds"}
    shared = {key: value for key, value in asdict(recipe.finetune).items() if key not in own}
    optimizer = {key: value for key, value in asdict(recipe.optimizer).items() if key != "lr"}
    return {"task": task, "model": asdict(model), "finetune": shared, "optimizer": optimizer}


def _model(recipe: FinetuneRecipe, runtime: Runtime) -> tuple[CheckpointReader | None, GPTConfig]:
    """What reads the weights to begin with, if any, and the model."""
    path, reader, model = recipe.finetune.init_from, None, recipe.model
    if path:
        reader, saved = open_either(path, dist.group.WORLD if runtime.world_size > 1 else None)
        model = saved if model is None else replace(model, vocab_size=model.vocab_size or saved.vocab_size)
    assert model is not None, "load_finetune asks for one of the two"
    if model.bert is None:
        raise ValueError("the model to fine-tune is a GPT; it must be a BERT, with a table [model.bert]")
    return reader, model


def _tokenizer(recipe: FinetuneRecipe, reader: CheckpointReader | None) -> Tokenizer:
    if recipe.finetune.tokenizer is not None:
        return load_tokenizer(recipe.finetune.tokenizer)
    if reader is None:
        raise ValueError("there is no tokenizer: give finetune.tokenizer")
    try:
        return tokenizer_beside(reader.directory.absolute())
    except ValueError as error:
        raise ValueError(f"{error}; name the model's tokenizer by finetune.tokenizer") from None
