"""`fastmp eval`: evaluate a model on held-out text. torch is imported after the arguments are read."""

from __future__ import annotations

import json
import shlex
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastmp
from fastmp.apps.evaluation.journal import Journal
from fastmp.apps.evaluation.result_tables import EvalProgress, read_result, table
from fastmp.apps.first_rank import only_rank0_prints, run_on_ranks
from fastmp.apps.generate import add_model_options, layout_of
from fastmp.apps.launch import check_ranks
from fastmp.config import Environment, GPTConfig
from fastmp.config.command_line import Parser, exit_status, number
from fastmp.config.file_access import write_whole

if TYPE_CHECKING:
    from fastmp.apps.evaluation.tasks import EvalTask
    from fastmp.distributed.groups import ParallelGroups
    from fastmp.distributed.runtime import Runtime
    from fastmp.training.checkpoint.storage import CheckpointReader

__all__ = ["TASKS", "TaskCommand", "main", "window_of"]

PAPER = ("wikitext", "lambada")  # tasks of examples.megatron_paper
_WINDOW = 1024  # tokens


@dataclass(frozen=True)
class TaskCommand:
    """A task of an evaluation command.

    summary, data, example: for the help. columns: figures that its table shows. make: of rows and summary.
    windows: whether it reads a text in windows, which begin `stride` tokens apart (None: the window).
    """

    summary: str
    data: str
    example: str
    columns: tuple[str, ...]
    make: Callable[[Namespace, CheckpointReader, GPTConfig], EvalTask]
    windows: bool = True
    stride: int | None = None


def _heldout(options: Namespace, reader: CheckpointReader, config: GPTConfig) -> EvalTask:
    from fastmp.apps.evaluation.tasks import heldout_task
    from fastmp.apps.generation.trained_models import model_tokenizer

    try:
        tokenizer = model_tokenizer(options, reader)
    except ValueError:
        if options.tokenizer or not Path(options.data).is_dir():
            raise
        tokenizer = None
    return heldout_task(options.data, tokenizer, window=window_of(options, config), stride=options.stride)


TASKS = {
    "heldout": TaskCommand(
        "loss per token and per byte",
        "a directory of token files with a validation split, or a text file",
        "data/docs --checkpoint runs/gpt",
        ("nats_per_byte", "nats_per_token", "perplexity_per_token", "num_tokens", "num_bytes"),
        _heldout,
    ),
}


def window_of(options: Namespace, config: GPTConfig) -> int:
    """Return the tokens of a window."""
    return options.window or min(_WINDOW, config.max_seq_len)


def main(
    argv: Sequence[str] | None = None, prog: str = "fastmp eval", tasks: Mapping[str, TaskCommand] = TASKS
) -> int:
    """Run the command `prog` with the arguments `argv`; return the exit status (2: invalid arguments)."""
    arguments, columns = list(argv or []), {name: task.columns for name, task in tasks.items()}
    words = [*prog.split()[1:], *arguments]
    with only_rank0_prints():
        parser = _parser(prog, tasks)
        if arguments and arguments[0] in PAPER and arguments[0] not in tasks:
            ranks = Environment.read().world_size
            start = "python" if ranks == 1 else f"fastmp launch -n {ranks}"
            meant = f"{start} -m examples.megatron_paper evaluate {shlex.join(arguments)}"
            parser.error(f"there is no task {arguments[0]!r}; did you mean: {meant}")
        options = parser.parse_args(argv)
        if options.task != "table":
            check_ranks(parser, layout_of(options), words[0], words[1:])
    if options.task == "table":
        results = (read_result(path, columns) for path in options.results)
        return exit_status(prog, lambda: print(table(results, columns)))
    make = tasks[options.task].make
    return run_on_ranks(prog, partial(_evaluate, options, make), lambda made: print(table([made], columns)))


def _parser(prog: str, tasks: Mapping[str, TaskCommand]) -> Parser:
    parser = Parser(
        prog=prog,
        description="Evaluate a trained model on local files. On several ranks: fastmp launch -n N "
        f"{prog.partition(' ')[2]} ...; the remaining ranks form the data-parallel dimension and share the "
        "batches.",
    )
    commands = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, task in tasks.items():
        text = f"{task.summary[0].upper()}{task.summary[1:]}.\n\n  {prog} {name} {task.example}"
        made = commands.add_parser(name, help=task.summary, description=text)
        made.add_argument("data", metavar="DATA", help=task.data)
        if task.windows:
            text = "tokens of a window (1024, or the model's positions if fewer)"
            made.add_argument("--window", metavar="N", type=number(int, 1), help=text)
            default = task.stride or "the window"
            text = f"tokens between the starts of two windows, which the second one scores ({default})"
            made.add_argument("--stride", metavar="N", type=number(int, 1), default=task.stride, help=text)
        add = made.add_argument
        add("--batch-size", metavar="N", type=number(int, 1), default=8, help="rows of a batch (8)")
        text = "write the result as JSON; an interrupted evaluation resumes from FILE.part"
        add("--out", metavar="FILE", help=text)
        add_model_options(made, "dtype of weights")
        add("--cp", metavar="N", type=number(int, 1), default=1, help="context-parallel ranks (1)")
        text = "shard activations outside of tensor-parallel regions along the sequence"
        add("--sequence-parallel", action="store_true", help=text)
        add("--graphs", action="store_true", help="replay batches of each shape as a CUDA graph")
    text = "compare several results"
    example = f"{prog} table step-1000.json step-2000.json"
    made = commands.add_parser("table", help=text, description=f"Compare several results.\n\n  {example}")
    made.add_argument("results", metavar="FILE", nargs="+", help="a result written by --out")
    return parser


def _evaluate(
    options: Namespace,
    make: Callable[[Namespace, CheckpointReader, GPTConfig], EvalTask],
    runtime: Runtime,
) -> dict[str, Any]:
    """Load the model on all ranks, make and evaluate the task, and return the result."""
    import torch.distributed as dist

    from fastmp.apps.evaluation.batches import evaluate
    from fastmp.apps.generation.trained_models import load_model, make_groups, open_weights
    from fastmp.training.checkpoint.collective_load import agree
    from fastmp.training.graphing import make_backend
    from fastmp.training.trainer import DTYPES

    groups = make_groups(options, runtime.world_size)
    world = dist.group.WORLD if runtime.world_size > 1 else None
    reader, config = open_weights(options.checkpoint, options.hf, world, options.ignore)
    task = agree(world, partial(make, options, reader, config))
    auto = "bfloat16" if runtime.device.type == "cuda" else "float32"
    dtype = auto if options.dtype == "auto" else options.dtype
    identity = {
        "task": task.name,
        **task.settings,
        "model": str(reader.directory),
        "weights": _weights_crc32(reader.directory),
        "dtype": dtype,
        "device": runtime.device.type,
        "layout": _layout(groups, options.sequence_parallel),
        "batch_size": options.batch_size,
    }
    out = Path(options.out) if options.out else None
    journal = agree(world, partial(_journal, out, identity, runtime.rank))
    model = load_model(
        reader,
        replace(config, mtp_depth=0),  # modules that only training and drafting use
        groups,
        device=runtime.device,
        dtype=DTYPES[dtype],
        sequence_parallel=options.sequence_parallel,
    )
    finished = len(journal.finished) * options.batch_size if journal else 0
    progress = EvalProgress(task.name, task.unit, len(task.rows), min(finished, len(task.rows)))
    backend = make_backend(None, runtime.device) if options.graphs else None
    try:
        figures = evaluate(
            task,
            model,
            groups=groups,
            batch_size=options.batch_size,
            journal=journal,
            report=progress.add if runtime.rank == 0 else lambda *of_rows: None,
            backend=backend,
        )
    finally:
        if backend is not None:
            backend.reset()  # before the process groups, which graphs refer to, are destroyed
    result = {**figures, **identity, "fastmp": fastmp.__version__}
    if runtime.rank == 0:
        progress.end()
        if out is not None and journal is not None:
            write_whole(out, json.dumps(result, indent=1) + "\n")
            journal.remove()
    return result


def _journal(out: Path | None, identity: Mapping[str, Any], rank: int) -> Journal | None:
    """Return the journal of finished batches; None on other ranks than 0 and without --out."""
    if out is None or rank:
        return None
    if out.is_dir():
        raise ValueError(f"--out {out}: is a directory; name a file")
    return Journal(out.with_name(out.name + ".part"), identity)


def _layout(groups: ParallelGroups, sequence_parallel: bool) -> str:
    """Return the model-parallel layout; the number of data-parallel ranks does not affect the result."""
    axes = [f"{axis} {groups.grid.size(axis)}" for axis in ("tp", "cp", "pp", "ep", "etp")]
    return ", ".join([*axes, *(["sequence parallel"] if sequence_parallel else [])])


def _weights_crc32(directory: Path) -> int:
    """Return a checksum of the names, sizes and modification times of the weights' files."""
    crc32 = 0
    for path in sorted(directory.glob("*.safetensors")):
        state = path.stat()
        crc32 = zlib.crc32(f"{path.name} {state.st_size} {state.st_mtime_ns} ".encode(), crc32)
    return crc32
