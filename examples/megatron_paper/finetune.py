"""`finetune`: fine-tune a BERT for a task. torch is imported after the arguments are read.

All ranks run the same code; only rank 0 writes the files of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.megatron_paper.finetuning.finetune_recipe import FinetuneRecipe, load_finetune, run_recipe
from examples.megatron_paper.finetuning.finetune_tasks import TASKS
from examples.megatron_paper.finetuning.results import FinetuneResult, check_same, write_results
from fastmp.apps.first_rank import let_rank0_report_first, only_rank0_prints
from fastmp.apps.launch import check_ranks
from fastmp.config import Environment, GPTConfig, option_names
from fastmp.config.command_line import Parser
from fastmp.config.console import to_stdout
from fastmp.config.recipe import add_options, add_recipe_option, given_options, parse_with_recipe
from fastmp.plan.layout import check_layout, make_grid

if TYPE_CHECKING:
    from fastmp.distributed.runtime import Runtime
    from fastmp.training.checkpoint.storage import CheckpointReader
    from fastmp.training.data.tokenize import Tokenizer

__all__ = ["finetune", "main"]

SHORT = {
    "finetune.path": "--data",
    "finetune.init_from": "--init-from",
    "finetune.name": "--name",
    "finetune.seeds": "--seeds",
}
# Options that --help shows, by title.
FIRST = {
    "fine-tuning": (
        *("finetune.path", "finetune.init_from", "finetune.tokenizer", "finetune.name", "finetune.seeds"),
        *("finetune.batch_size", "finetune.micro_batch_size", "finetune.epochs", "finetune.dtype"),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `finetune` with the arguments `argv`; return the exit status."""
    with only_rank0_prints():
        parser = _parser()
        options = parse_with_recipe(parser, list(argv or []))
        try:
            recipe = load_finetune(options.task, options.recipe, given_options(options))
        except ValueError as error:
            parser.error(str(error))
        check_ranks(parser, recipe.parallel, "-m", ["examples.megatron_paper", "finetune", *(argv or [])])
    from fastmp.distributed.runtime import init, main_guard  # imports torch

    def job() -> int:
        with let_rank0_report_first(Environment.read().rank or 0):
            runtime = init()
            finetune(options.task, recipe, runtime, grid=options.grid)
        runtime.close()
        return 0

    return main_guard(job)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m examples.megatron_paper finetune",
        usage="python -m examples.megatron_paper finetune TASK [FILE] --data DIR [--init-from PATH] [--grid] "
        "[options]",
        synonyms=option_names.SYNONYMS,
        description="Fine-tune a BERT for a task with several seeds, and report the median score on the "
        "development set. Run the same command again to resume an interrupted job. On several ranks: fastmp "
        "launch -n N -m examples.megatron_paper finetune ...\n\n  python -m examples.megatron_paper finetune "
        "mnli configs/finetune/mnli.toml --data glue/MNLI --init-from runs/bert",
    )
    parser.add_argument("task", metavar="TASK", choices=tuple(TASKS), help=", ".join(TASKS))
    add_recipe_option(parser)
    parser.add_argument(
        "--grid", action="store_true", help="run all batch sizes and learning rates of the paper's Table 6"
    )
    first = (*FIRST, "parallelism", "optimizer and precision")
    titles, short = {**option_names.FIRST, **FIRST}, {**option_names.SHORT, **SHORT}
    add_options(parser, FinetuneRecipe, first, titles=titles, short=short)
    return parser


def finetune(
    task: str, recipe: FinetuneRecipe, runtime: Runtime, *, grid: bool = False
) -> list[FinetuneResult]:
    """Do the unfinished runs of a task, one for each point and seed, and report all runs.

    Args:
        task: a name in `TASKS`.
        recipe: of the runs.
        runtime: all ranks call this.
        grid: fine-tune at every point of the paper's Table 6 instead of the recipe's point.

    Returns:
        The finished runs; some are missing if a signal stopped the job.

    Raises:
        ValueError: the files are not the task's, the model is not a BERT or does not fit the tokenizer or the
            ranks, or the run directory belongs to another recipe. Nothing is written then.
    """
    from examples.megatron_paper.finetuning.runs import Runs, on_first
    from examples.megatron_paper.finetuning.splits import prepare, vocab_size_of
    from fastmp.apps.train_main import claimed
    from fastmp.distributed.groups import ParallelGroups

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
        to_stdout("\n".join(lines))


def _identity(task: str, recipe: FinetuneRecipe, model: GPTConfig) -> dict[str, Any]:
    """Return the settings that all runs of one name share; points, seeds, layout and log may differ."""
    own = {"batch_size", "micro_batch_size", "seeds", "seed", "name", "run_dir"}
    own |= {"log_interval", "save_interval", "stall_seconds"}
    shared = {key: value for key, value in asdict(recipe.finetune).items() if key not in own}
    optimizer = {key: value for key, value in asdict(recipe.optimizer).items() if key != "lr"}
    return {"task": task, "model": asdict(model), "finetune": shared, "optimizer": optimizer}


def _model(recipe: FinetuneRecipe, runtime: Runtime) -> tuple[CheckpointReader | None, GPTConfig]:
    """Return the reader of the initial weights, or None, and the model."""
    import torch.distributed as dist

    from fastmp.apps.generation.trained_models import open_either

    path, reader, model = recipe.finetune.init_from, None, recipe.model
    if path:
        reader, saved = open_either(path, dist.group.WORLD if runtime.world_size > 1 else None)
        model = saved if model is None else replace(model, vocab_size=model.vocab_size or saved.vocab_size)
    assert model is not None, "load_finetune asks for one of the two"
    if model.bert is None:
        raise ValueError("the model to fine-tune is a GPT; it must be a BERT, with a table [model.bert]")
    return reader, model


def _tokenizer(recipe: FinetuneRecipe, reader: CheckpointReader | None) -> Tokenizer:
    from fastmp.apps.generation.trained_models import tokenizer_beside
    from fastmp.training.data.tokenize import load_tokenizer

    if recipe.finetune.tokenizer is not None:
        return load_tokenizer(recipe.finetune.tokenizer)
    if reader is None:
        raise ValueError("there is no tokenizer: give finetune.tokenizer")
    try:
        return tokenizer_beside(reader.directory.absolute())
    except ValueError as error:
        raise ValueError(f"{error}; name the model's tokenizer by finetune.tokenizer") from None
