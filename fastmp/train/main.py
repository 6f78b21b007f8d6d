"""A training job: one recipe, one GPT, from text to a loss curve and a sample of what was learnt.

`fastmp.train.command` reads the command line and calls `run`, which calls the parts in turn: groups, random
streams, data, model, Trainer.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.config import Environment, Recipe
from fastmp.integrations.transformer_engine import TransformerEngineManager
from fastmp.layout import check_layout, make_grid, problems
from fastmp.nn.models import GPT, flops_per_token, num_parameters
from fastmp.nn.stages import GPTStage
from fastmp.parallel.collectives import group_rank
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.rng import RngTracker
from fastmp.parallel.runtime import Runtime, init, main_guard
from fastmp.train.command import first_rank_speaks
from fastmp.train.data import TokenDataset
from fastmp.train.evaluate import Evaluation
from fastmp.train.generate import generate_text
from fastmp.train.heap import map_large_blocks
from fastmp.train.kernels import warm_up_ranks
from fastmp.train.language import gpt_and_loss, next_logits, pipeline_next_logits
from fastmp.train.metrics import RunInfo, TrainLog, read_metrics
from fastmp.train.microbatches import LossFunction, PipelineLoss, WholeModel, evaluation_mode
from fastmp.train.plot import plot_loads, plot_loss
from fastmp.train.profile import NSIGHT, StepProfiler, run_under_nsight
from fastmp.train.stopping import StopSignals
from fastmp.train.trainer import DTYPES, Trainer

SAMPLE_PROMPT = "The "
SAMPLE_TOKENS = 240


def run(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Train `recipe` as this process's whole program; returns the exit status.

    Nsight runs `fastmp train` once more, with these `arguments`.
    """
    return main_guard(lambda: _job(recipe, arguments))


def _job(recipe: Recipe, arguments: Sequence[str]) -> int:
    environment = Environment.read()
    with first_rank_speaks(environment.rank or 0):
        if recipe.train.profile in NSIGHT and not environment.rank and not environment.profiled:
            run_under_nsight(arguments, recipe)
        runtime = init(join_seconds=recipe.train.join_seconds or None)
        if runtime.device.type == "cpu":
            map_large_blocks()
        train(recipe, runtime, resume=recipe.train.resume or environment.restart_count > 0)
    runtime.close()
    return 0


def train(recipe: Recipe, runtime: Runtime, *, resume: bool = False) -> Evaluation | None:
    """Train the GPT of `recipe` on this rank of the job; all ranks call it. Returns the last evaluation.

    ValueError, before anything is written, for a layout that does not fit the world or the model, and for
    text that cannot be read or does not fit the model. ValueError too where another process is at this run.
    """
    groups = make_groups(recipe, runtime)
    data = open_data(recipe, runtime)
    if not recipe.model.vocab_size:
        recipe = replace(recipe, model=replace(recipe.model, vocab_size=data.vocab_size))
    rng = RngTracker(recipe.train.seed, device=runtime.device, **_streams(groups))
    model, loss = build_model(recipe, groups, rng, runtime.device)
    trainer = Trainer(
        model,
        data,
        loss,
        recipe.train,
        optimizer=recipe.optimizer,
        groups=groups,
        rng=rng,
        device=runtime.device,
        graphs=recipe.graphs,
        graph_manager=TransformerEngineManager if recipe.graphs.impl == "transformer_engine" else None,
    )
    run_dir = Path(recipe.train.run_dir) / recipe.train.name
    with ExitStack() as held:
        held.callback(trainer.close)
        notes = [_describe(recipe, groups, runtime, trainer)]
        warm_up_ranks(recipe, runtime)
        existed = runtime.rank == 0 and run_dir.exists()
        if existed:
            held.enter_context(_claimed(run_dir))
        if resume and trainer.resume():
            notes.append(f"resumed after step {trainer.step}")
        elif runtime.rank == 0:
            if resume:
                notes.append(f"no checkpoint in {run_dir}: starting at step 0")
            if existed:
                notes.append(f"the earlier run of this name is now {_move_aside(run_dir)}")
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(_claimed(run_dir))
        return _run(recipe, runtime, trainer, run_dir, notes)


def _run(
    recipe: Recipe, runtime: Runtime, trainer: Trainer, run_dir: Path, notes: Sequence[str]
) -> Evaluation | None:
    """Run it, into a directory that is this job's own; `notes` open its log.

    SystemExit with the status that shells give to the signal, where one has stopped the run.
    """
    data = trainer.data
    run = RunInfo(
        total_steps=recipe.train.steps,
        tokens_per_step=recipe.train.global_batch_size * recipe.data.seq_len,
        flops_per_token=flops_per_token(recipe.model, recipe.data.seq_len),
        bytes_per_token=data.train.info.bytes_per_token,
        device=str(runtime.device),
        world_size=runtime.world_size,
    )
    options = {"log_interval": recipe.train.log_interval, "start_step": trainer.step, "rank": runtime.rank}
    with TrainLog(run_dir, run, **options) as log:
        for note in notes:
            log.note(note)
        if runtime.rank == 0:
            (run_dir / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
        with (
            _profiled(recipe, runtime, run_dir, log) as profiler,
            StopSignals(runtime.rank, runtime.world_size) as stop,
        ):
            evaluation = trainer.train(log, before_step=profiler, stop=stop)
            if stop.number:
                log.note(
                    f"stopped after step {trainer.step}; go on from there with the same command and --resume"
                )
                raise SystemExit(128 + stop.number)
    grid = trainer.groups.grid
    with evaluation_mode(trainer.runner.chunks):
        sample = generate_text(
            _next_logits(trainer),
            SAMPLE_PROMPT,
            tokenizer=data.tokenizer,
            max_new_tokens=SAMPLE_TOKENS,
            max_seq_len=recipe.data.seq_len,  # positions beyond it are untrained
            temperature=0.8,
            seed=recipe.train.seed,
            group=trainer.groups.tp,
            together=None if recipe.model.moe is None else trainer.groups.tp_cp_dp,
            pad_multiple=math.lcm(64, 2 * grid.cp * grid.tp),  # context and sequence parallelism divide it
        )
    if runtime.rank == 0:
        _report(recipe, run_dir, evaluation, sample)
    return evaluation


def _next_logits(trainer: Trainer) -> Callable[[Tensor, int], Tensor]:
    if isinstance(trainer.runner, WholeModel):
        return next_logits(trainer.model)
    return pipeline_next_logits(trainer.runner.chunks, trainer.groups)


@contextmanager
def _profiled(
    recipe: Recipe, runtime: Runtime, run_dir: Path, log: TrainLog
) -> Iterator[StepProfiler | None]:
    """The first rank's profiler of the steps that the recipe names; None where nothing is to be profiled."""
    if recipe.train.profile == "none" or runtime.rank:
        yield None
        return
    profiler = StepProfiler(recipe.train.profile, recipe.train.profile_steps, run_dir, log)
    try:
        yield profiler
    finally:
        profiler.close()


def make_groups(recipe: Recipe, runtime: Runtime) -> ParallelGroups:
    """The process groups of `recipe` in this job; ValueError where its layout does not fit the world."""
    layout = recipe.parallel
    for name in ("tp", "cp", "pp", "ep", "etp"):
        size = getattr(layout, name)
        if runtime.world_size == 1 and size is not None and size > 1:
            dense, experts = layout.tp * layout.cp, layout.ep * (layout.etp or layout.tp)
            ranks = layout.pp * math.lcm(dense, experts)
            others = "".join(f"\n  {problem}" for problem in problems(recipe, ranks))
            raise ValueError(
                f"parallel.{name} is {size}, but world_size is 1; start the ranks with "
                f"torchrun --nproc-per-node {ranks} -m fastmp train{others}"
            )
    check_layout(recipe, runtime.world_size)
    return ParallelGroups.create(make_grid(recipe, runtime.world_size))


def build_model(
    recipe: Recipe, groups: ParallelGroups, rng: RngTracker, device: torch.device
) -> tuple[GPT, LossFunction] | tuple[list[GPTStage], PipelineLoss]:
    """The GPT of `recipe` on `device`, whole or this rank's stages of it, and its loss.

    dtype "auto" is bfloat16 on a GPU and float32 elsewhere. The weights are the same on every layout; what is
    drawn later differs from stage to stage.
    """
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"rng": rng, "device": device, "dtype": DTYPES.get(recipe.train.dtype, auto)}
    model, loss = gpt_and_loss(recipe.model, groups, recipe.parallel, **options)
    if isinstance(loss, PipelineLoss):
        own = RngTracker(recipe.train.seed, device=device, pp_rank=group_rank(groups.pp), **_streams(groups))
        rng.restore(own.states())
    return model, loss


def _streams(groups: ParallelGroups) -> dict[str, int]:
    """The options of RngTracker that choose this rank's random streams."""
    cp = {} if groups.cp is None else {"cp_rank": group_rank(groups.cp)}
    return {"tp_rank": group_rank(groups.tp), **cp}


def open_data(recipe: Recipe, runtime: Runtime) -> TokenDataset:
    """The token files of `recipe`: the first rank of every machine builds them, the others wait for it."""
    cache_dir = Path(recipe.train.run_dir) / "data"
    if recipe.train.name == cache_dir.name:
        raise ValueError(f"{cache_dir} is for token files; choose another name for the run")
    if runtime.local_rank == 0:
        data = TokenDataset.from_config(recipe.data, cache_dir=cache_dir)
    if runtime.world_size > 1:
        dist.barrier()
    if runtime.local_rank != 0:
        data = TokenDataset.from_config(recipe.data, cache_dir=cache_dir)
    if 0 < recipe.model.vocab_size < data.vocab_size:
        raise ValueError(
            f"the data has a vocabulary of {data.vocab_size} tokens, model.vocab_size is "
            f"{recipe.model.vocab_size}; leave it out, and it is that of the data"
        )
    if recipe.train.eval_interval:
        _ = data.validation  # raises now rather than at the first evaluation
    return data


@contextmanager
def _claimed(run_dir: Path) -> Iterator[None]:
    """Hold a lock on `run_dir`, wherever it is moved: two jobs of one name would mix their checkpoints."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training into {run_dir}; choose another train.name"
            ) from None
        except OSError:
            pass  # a file system that cannot lock a directory (NFS) does without
        yield
    finally:
        os.close(descriptor)


def _move_aside(run_dir: Path) -> Path:
    """Rename what an earlier run of this name left; a new run never mixes with it nor deletes it."""
    other = next(p for i in count(1) if not (p := run_dir.with_name(f"{run_dir.name}.{i}")).exists())
    return run_dir.rename(other)


def _describe(recipe: Recipe, groups: ParallelGroups, runtime: Runtime, trainer: Trainer) -> str:
    grid, layout = groups.grid, recipe.parallel
    dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    sequence = " with sequence parallelism" if layout.sequence_parallel and grid.tp > 1 else ""
    context = f", CP {grid.cp}" if grid.cp > 1 else ""
    stages = ""
    if grid.pp * layout.vpp > 1:
        stages = f", PP {grid.pp} x VPP {layout.vpp} ({layout.schedule})"
    experts = f"; experts: EP {grid.ep}, ETP {grid.etp}, DP {grid.edp}" if grid.ep > 1 else ""
    total, active = (num_parameters(recipe.model, active=active) / 1e6 for active in (False, True))
    of_them = f" ({active:.2f} M for a token)" if recipe.model.moe is not None else ""
    return (
        f"{total:.2f} M parameters{of_them} in {dtype} on {runtime.device.type}, {runtime.world_size} ranks: "
        f"TP {grid.tp}{sequence}{context}{stages}, DP {grid.dp}{experts}"
    )


def _describe_loads(last: dict[str, Any]) -> str:
    """The load of the experts in the last steps of the run, a number a layer, from their record."""
    highest, lowest = (", ".join(f"{load:.2f}" for load in last[key]) for key in ("max_load", "min_load"))
    return f"load of the experts over the mean, layer by layer: busiest {highest}; idlest {lowest}"


def _report(recipe: Recipe, run_dir: Path, evaluation: Evaluation | None, sample: str) -> None:
    if evaluation is not None:
        below = evaluation.unigram_entropy - evaluation.loss_per_byte
        print(
            f"held-out loss {evaluation.loss_per_byte:.4f} nats per byte, {below:.2f} below the unigram "
            f"entropy of the same text, {evaluation.unigram_entropy:.4f}"
        )
    metrics, title = run_dir / "metrics.jsonl", recipe.train.name
    pictures = {"loss plot": plot_loss(metrics, run_dir / "loss.png", title=title)}
    if loads := [record for record in read_metrics(metrics) if record["kind"] == "experts"]:
        print(_describe_loads(loads[-1]))
        pictures["load plot"] = plot_loads(metrics, run_dir / "load.png", title=title)
    drawn = [f"{name} {path}" for name, path in pictures.items() if path]
    print(", ".join([f"metrics in {metrics}", *drawn]))
    print(f"a sample:\n{SAMPLE_PROMPT}{sample}")
