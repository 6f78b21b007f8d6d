"""What `fastmp eval` does on each rank: groups, tokenizer, task and weights, then all rows in batches."""

from __future__ import annotations

import json
import zlib
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fastmp
from fastmp.apps.evaluation.journal import Journal
from fastmp.apps.evaluation.loop import evaluate
from fastmp.apps.evaluation.report import ProgressLine, table
from fastmp.apps.evaluation.tasks import EvalTask, heldout_task, lambada_task, wikitext_task
from fastmp.apps.generation.load import load_model, make_groups, model_tokenizer, open_weights
from fastmp.apps.generation.on_ranks import run_on_ranks
from fastmp.config import GPTConfig
from fastmp.config.files import write_whole
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.runtime import Runtime
from fastmp.training.checkpoint.load import agree
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.graphing import make_backend
from fastmp.training.trainer import DTYPES

__all__ = ["run"]

_WINDOW = 1024


def run(options: Namespace) -> int:
    """Evaluate as this process's whole program; returns the exit status, 2 for what the user did wrong.

    BrokenPipeError where nobody reads the result any more.
    """
    return run_on_ranks("eval", partial(_evaluate, options), lambda result: print(table([result])))


def _evaluate(options: Namespace, runtime: Runtime) -> dict[str, Any]:
    groups = make_groups(options, runtime.world_size, "eval")
    world = dist.group.WORLD if runtime.world_size > 1 else None
    reader, config = open_weights(options.checkpoint, options.hf, world, options.ignore)
    task = agree(world, partial(_task, options, reader, config))
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
        config,
        groups,
        device=runtime.device,
        dtype=DTYPES[dtype],
        sequence_parallel=options.sequence_parallel,
    )
    finished = len(journal.finished) * options.batch_size if journal else 0
    progress = ProgressLine(task.name, task.unit, len(task.rows), min(finished, len(task.rows)))
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
            backend.reset()  # before the process groups go, which graphs hold on to
    result = {**figures, **identity, "fastmp": fastmp.__version__}
    if runtime.rank == 0:
        progress.end()
        if out is not None and journal is not None:
            write_whole(out, json.dumps(result, indent=1) + "\n")
            journal.remove()
    return result


def _task(options: Namespace, reader: CheckpointReader, config: GPTConfig) -> EvalTask:
    """The task that the command line asks for, with the model's tokenizer."""
    if options.task == "lambada":
        tokenizer = model_tokenizer(options, reader)
        return lambada_task(options.data, tokenizer, max_seq_len=config.max_seq_len)
    window = options.window or min(_WINDOW, config.max_seq_len)
    try:
        tokenizer = model_tokenizer(options, reader)
    except ValueError:
        if options.task == "wikitext" or options.tokenizer or not Path(options.data).is_dir():
            raise
        return heldout_task(options.data, None, window=window, stride=options.stride)
    make = wikitext_task if options.task == "wikitext" else heldout_task
    return make(options.data, tokenizer, window=window, stride=options.stride)


def _journal(out: Path | None, identity: Mapping[str, Any], rank: int) -> Journal | None:
    """On the first rank, where there is to be a result, what is finished of it."""
    if out is None or rank:
        return None
    if out.is_dir():
        raise ValueError(f"--out {out}: is a directory; name a file")
    return Journal(out.with_name(out.name + ".part"), identity)


def _layout(groups: ParallelGroups, sequence_parallel: bool) -> str:
    """What a model is divided over; how many ranks share the batches makes no difference."""
    axes = [f"{axis} {groups.grid.size(axis)}" for axis in ("tp", "cp", "pp", "ep", "etp")]
    return ", ".join([*axes, *(["sequence parallel"] if sequence_parallel else [])])


def _weights_crc32(directory: Path) -> int:
    """A number that changes where the files of the weights are written anew."""
    crc32 = 0
    for path in sorted(directory.glob("*.safetensors")):
        state = path.stat()
        crc32 = zlib.crc32(f"{path.name} {state.st_size} {state.st_mtime_ns} ".encode(), crc32)
    return crc32
