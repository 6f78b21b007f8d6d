"""`fastmp train` after the command line is read: build groups, data and model, and train.

`fastmp.apps.train` reads the command line and calls `run`, which calls the parts in turn: groups, random
streams, data, model, Trainer.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.apps.first_rank import let_rank0_report_first
from fastmp.apps.generation.sample_text import generate_text
from fastmp.apps.generation.trained_models import open_reader
from fastmp.apps.resumed import changes_since
from fastmp.apps.signals import work_is_saved
from fastmp.config import Environment, Recipe
from fastmp.config.console import to_stderr, to_stdout
from fastmp.config.file_access import open_directory, write_whole
from fastmp.config.options import duration_seconds
from fastmp.cuda_graphs.transformer_engine import TransformerEngineManager
from fastmp.distributed.collectives import communication_device, group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.distributed.runtime import Runtime, init, lost_peer, main_guard
from fastmp.hf.weight_io import check_family, export_weights
from fastmp.nn.gpt import flops_per_token, num_parameters
from fastmp.nn.stages import GPTStage
from fastmp.plan.layout import check_layout, make_grid
from fastmp.plan.parameters import expert_stages
from fastmp.training.checkpoint.checkpointer import Loaded
from fastmp.training.checkpoint.model_weights import load_weights
from fastmp.training.data.blend import BlendedDataset, open_dataset
from fastmp.training.data.dataset import TokenDataset
from fastmp.training.data.masked import MaskedDataset
from fastmp.training.heap import map_large_blocks
from fastmp.training.language import ModelAndLoss, model_and_loss, next_logits, pipeline_next_logits
from fastmp.training.metrics import RunInfo, TrainLog, read_metrics
from fastmp.training.microbatches import PipelineLoss, evaluation_mode
from fastmp.training.plot import plot_loads, plot_loss
from fastmp.training.profiler import NSIGHT, StepProfiler, run_under_nsight
from fastmp.training.recipe_kernels import warm_up_ranks
from fastmp.training.sinks import Sinks, check_sinks
from fastmp.training.stopping import StopRequests
from fastmp.training.trainer import DTYPES, Trainer
from fastmp.training.validation import Evaluation
from fastmp.watchdog.inspector import host_id
from fastmp.watchdog.node import job_directory
from fastmp.watchdog.watchdog import Watchdog, watch

SAMPLE_PROMPT = "The "
SAMPLE_TOKENS = 240
START_SECONDS = 900.0  # without progress, four times, end a start: data may have to be built
_starts = count()  # every start has a directory of its own


def run(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Train `recipe` as the whole program of this process; return the exit status.

    Nsight runs `fastmp train` once more, with these `arguments`.
    """
    return main_guard(lambda: _job(recipe, arguments))


def _job(recipe: Recipe, arguments: Sequence[str]) -> int:
    environment = Environment.read()
    with let_rank0_report_first(environment.rank or 0):
        if recipe.train.profile in NSIGHT and not environment.rank and not environment.profiled:
            run_under_nsight(arguments, recipe)
        runtime = init(join_seconds=recipe.train.join_seconds or None)
        if runtime.device.type == "cpu":
            map_large_blocks()
        train(recipe, runtime, restarted=environment.restart_count > 0, arguments=arguments)
    runtime.close()
    return 0


def train(
    recipe: Recipe, runtime: Runtime, *, restarted: bool = False, arguments: Sequence[str] = ()
) -> Evaluation | None:
    """Train the model of `recipe` on this rank and return the last evaluation. All ranks call it.

    A job that a launcher has restarted, as any of its ranks knows, goes on from its latest checkpoint,
    whatever the recipe says. A run that is stopped, by a signal or `recipe.train.max_time`, is saved, says
    which command goes on from there, for which it needs its `arguments`, and returns None. Its time counts
    from this call.

    ValueError, before anything is written, for a layout that does not fit the world or the model, and for
    text that cannot be read or does not fit the model, and for a sink that is not installed. ValueError too
    where another process is at this run.
    """
    limit = recipe.train.max_time
    deadline = time.monotonic() + duration_seconds(limit) if limit else None
    check_sinks(recipe.train.sinks)
    with ExitStack() as held, ExitStack() as starting:
        starting.enter_context(_watch_start(recipe, runtime))
        recipe, trainer = make_trainer(recipe, runtime)
        held.callback(trainer.close)
        run_dir = Path(recipe.train.run_dir) / recipe.train.name
        notes = [_describe(recipe, runtime, trainer)]
        warm_up_ranks(recipe, runtime)
        existed = runtime.rank == 0 and run_dir.exists()
        if existed:
            held.enter_context(claimed(run_dir))
        loaded = _resume(recipe, trainer, _on_any_rank(restarted, _world(runtime)))
        if loaded is None and recipe.checkpoint.init_from:
            notes.append(f"starting with the weights of {recipe.checkpoint.init_from}")
        if loaded is not None or recipe.checkpoint.resume:
            notes.append(_describe_start(trainer, loaded))
        if loaded is not None and runtime.rank == 0:
            notes += changes_since(recipe, loaded.path, trainer.step)
        own = trainer.saving.checkpointer.directory.resolve()
        if runtime.rank == 0 and (loaded is None or loaded.path.resolve().parent != own):
            if existed:
                notes.append(f"the earlier run of this name is now {_move_aside(run_dir)}")
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(claimed(run_dir))
        stop = StopRequests(runtime.rank, runtime.world_size, deadline)
        starting.close()
        return _run(recipe, runtime, trainer, run_dir, notes, stop, arguments)


def make_trainer(recipe: Recipe, runtime: Runtime) -> tuple[Recipe, Trainer]:
    """Make the trainer of `recipe` on this rank, and the recipe with the size of its data's vocabulary."""
    groups = make_groups(recipe, runtime)
    data = open_data(recipe, runtime)
    if not recipe.model.vocab_size:
        recipe = replace(recipe, model=replace(recipe.model, vocab_size=data.vocab_size))
    rng = RngTracker(recipe.train.seed, device=runtime.device, **_streams(groups))
    model, loss = build_model(recipe, groups, rng, runtime.device)
    if recipe.checkpoint.init_from:
        chunks = [model] if isinstance(model, nn.Module) else model
        reader = open_reader(recipe.checkpoint.init_from, _world(runtime))
        load_weights(reader, recipe.model, chunks, groups)
    return recipe, Trainer(
        model,
        data,
        loss,
        recipe.train,
        optimizer=recipe.optimizer,
        checkpoint=recipe.checkpoint,
        groups=groups,
        rng=rng,
        device=runtime.device,
        graphs=recipe.graphs,
        overlap_experts=recipe.parallel.overlap_experts,
        graph_manager=TransformerEngineManager if recipe.graphs.impl == "transformer_engine" else None,
        after_save=_weights_writer(recipe),
    )


def _world(runtime: Runtime) -> dist.ProcessGroup | None:
    """Return the group of all ranks; None on a single rank."""
    return dist.group.WORLD if runtime.world_size > 1 else None


def _on_any_rank(flag: bool, world: dist.ProcessGroup | None) -> bool:
    """Return True if `flag` is set on any rank; only the torchrun whose rank died counts a restart."""
    if world is None:
        return flag
    number = torch.tensor(int(flag), device=communication_device())
    dist.all_reduce(number, dist.ReduceOp.MAX, group=world)  # of one number, however many ranks there are
    return bool(number)


def _weights_writer(recipe: Recipe) -> Callable[[Path, int], str] | None:
    """Return a callback that exports each checkpoint to HF format. Raises ValueError for models HF lacks."""
    interval = recipe.checkpoint.weights_interval
    if not interval:
        return None
    check_family(recipe.model)

    def write(checkpoint: Path, step: int) -> str:
        if step % interval:
            return ""
        out = Path(recipe.train.run_dir) / recipe.train.name / "weights" / checkpoint.name
        return f"weights for transformers in {export_weights(checkpoint, recipe.model, out)}"

    return write


def _resume(recipe: Recipe, trainer: Trainer, restarted: bool) -> Loaded | None:
    """Load the checkpoint that the recipe resumes from, if any."""
    wanted, loaded = recipe.checkpoint.resume, None
    if restarted or wanted == "auto":
        loaded = trainer.resume()
    if loaded is None and wanted not in ("", "auto"):
        loaded = trainer.resume(wanted)
    return loaded


def _describe_start(trainer: Trainer, loaded: Loaded | None) -> str:
    if loaded is None:
        return f"no checkpoint in {trainer.saving.checkpointer.directory}: starting at step 0"
    before, now = loaded.layout, trainer.saving.checkpointer.layout
    other = [f"{axis} {size}" for axis, size in sorted(before.items()) if now.get(axis) != size]
    layout = f", which was saved with {', '.join(other)}: random streams start anew" if other else ""
    return f"resumed after step {trainer.step} from {loaded.path}{layout}"


def _run(
    recipe: Recipe,
    runtime: Runtime,
    trainer: Trainer,
    run_dir: Path,
    notes: Sequence[str],
    stop: StopRequests,
    arguments: Sequence[str],
) -> Evaluation | None:
    """Run the training loop in this job's `run_dir`; `notes` open its log."""
    data: Any = trainer.data  # of `open_data`
    run = RunInfo(
        total_steps=recipe.train.steps,
        tokens_per_step=recipe.train.global_batch_size * recipe.data.seq_len,
        flops_per_token=flops_per_token(recipe.model, recipe.data.seq_len, predicted=recipe.data.predicted),
        bytes_per_token=data.bytes_per_token,
        device=str(runtime.device),
        world_size=runtime.world_size,
        ep=recipe.parallel.ep,
        expert_stages=expert_stages(recipe),
        mtp_depth=recipe.model.mtp_depth,
    )
    options: dict[str, Any] = {
        "log_interval": recipe.train.log_interval,
        "start_step": trainer.step,
        "rank": runtime.rank,
    }

    def sinks() -> Sinks:
        return Sinks(recipe.train.sinks, run_dir, start_step=trainer.step, config=asdict(recipe))

    with TrainLog(run_dir, run, **options, sinks=sinks) as log:
        for note in notes:
            log.note(note)
        if runtime.rank == 0:
            write_whole(run_dir / "recipe.json", json.dumps(asdict(recipe), indent=1) + "\n")
        profiled: Any = nullcontext()
        if recipe.train.profile != "none" and runtime.rank == 0:
            profiled = closing(StepProfiler(recipe.train.profile, recipe.train.profile_steps, run_dir, log))
        # A launcher that has lost a rank ends the others by SIGTERM: they say why first.
        with (
            profiled as profiler,
            stop,
            watch(run_dir / "hang", runtime, recipe.train.stall_seconds, note=log.note),
        ):
            evaluation = trainer.train(log, before_step=profiler, stop=stop)
            work_is_saved()
        if stop.reason:
            to_go_on = _next_command(recipe, runtime, arguments)
            log.note(f"stopped after step {trainer.step} ({stop.reason}); {to_go_on}")
            return None
    sample = None
    if recipe.model.bert is None:
        try:
            sample = _sample(recipe, trainer)
        except RuntimeError as error:
            if not lost_peer(error):  # ended by a signal, say, as all work is saved
                raise
            if runtime.rank == 0:
                to_stdout(f"no sample: a rank ended ({' '.join(str(error).split())})")
    if runtime.rank == 0:
        _report(recipe, run_dir, evaluation, sample)
    return evaluation


def _sample(recipe: Recipe, trainer: Trainer) -> str:
    """Return a text that the model continues. All ranks call it."""
    grid, data = trainer.groups.grid, cast(Any, trainer.data)
    with evaluation_mode(trainer.runner.chunks):
        return generate_text(
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


@contextmanager
def _watch_start(recipe: Recipe, runtime: Runtime) -> Iterator[None]:
    """Run the hang watchdog while a job of several ranks starts.

    Ranks that make process groups wait in C++ for the address of a rank that is gone, up to the timeout of
    the group. The run's directory is not there yet, so the ranks of a machine share a temporary one. Where
    that cannot be private, as on file systems without modes, its ranks start unwatched.
    """
    if runtime.world_size == 1 or not recipe.train.stall_seconds:
        yield
        return
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"fastmp/start/{next(_starts)}"
    if runtime.rank == 0:
        store.set(key, uuid4().hex)
    directory, watched = Path(), True
    try:
        directory = job_directory(Path(gettempdir()), "start", store.get(key).decode(), host_id()[0])
    except OSError as error:
        watched = False
        if runtime.local_rank == 0:
            to_stderr(
                f"fastmp: rank {runtime.rank}: starting without the hang watchdog, which needs a private "
                f"temporary directory ({error}); set TMPDIR to another place"
            )
    seconds = max(recipe.train.stall_seconds, START_SECONDS)
    watchdog = Watchdog(directory, runtime.rank, runtime.world_size, seconds)  # all ranks make as many
    if not watched:
        yield
        return
    try:
        with watchdog:
            yield
    except ValueError:  # a user's mistake, which all ranks find, leaves no files
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _next_command(recipe: Recipe, runtime: Runtime, arguments: Sequence[str]) -> str:
    """Return the command that resumes a run started with `arguments`."""
    resume = [] if recipe.checkpoint.resume == "auto" else ["--resume", "auto"]
    launcher = "" if runtime.world_size == 1 else " under the same launcher"
    return f"to go on{launcher}: {shlex.join(['fastmp', 'train', *arguments, *resume])}"


def _next_logits(trainer: Trainer) -> Callable[[Tensor, int], Tensor]:
    runner, chunks = trainer.runner, cast("list[Any]", trainer.runner.chunks)
    if isinstance(chunks[0], GPTStage):
        return pipeline_next_logits(chunks, trainer.groups, runner.functions.schedule)
    return next_logits(chunks[0])


def make_groups(recipe: Recipe, runtime: Runtime) -> ParallelGroups:
    """Return the process groups of `recipe`. Raises ValueError if its layout does not fit the world size."""
    check_layout(recipe, runtime.world_size)
    return ParallelGroups.create(make_grid(recipe, runtime.world_size))


def build_model(
    recipe: Recipe, groups: ParallelGroups, rng: RngTracker, device: torch.device
) -> ModelAndLoss:
    """Return the model of `recipe` on `device`, or this rank's pipeline stages, and its loss.

    dtype "auto" is bfloat16 on a GPU and float32 elsewhere. The weights are the same on every layout; what is
    drawn later differs from stage to stage.
    """
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"rng": rng, "device": device, "dtype": DTYPES.get(recipe.train.dtype, auto)}
    built = model_and_loss(recipe, groups, **options)
    if isinstance(built[1], PipelineLoss):
        own = RngTracker(recipe.train.seed, device=device, pp_rank=group_rank(groups.pp), **_streams(groups))
        rng.follow(own)
    return built


def _streams(groups: ParallelGroups) -> dict[str, int]:
    """Return the options of RngTracker that select this rank's random streams."""
    cp = {} if groups.cp is None else {"cp_rank": group_rank(groups.cp)}
    return {"tp_rank": group_rank(groups.tp), **cp}


def open_data(recipe: Recipe, runtime: Runtime) -> TokenDataset | BlendedDataset | MaskedDataset:
    """Return the token files of `recipe`; the first rank of each machine builds them, the others wait."""
    cache_dir = Path(recipe.train.run_dir) / "data"
    if recipe.train.name == cache_dir.name:
        raise ValueError(f"{cache_dir} is for token files; choose another name for the run")
    options: dict[str, Any] = {"cache_dir": cache_dir, "static_shapes": recipe.graphs.enabled}
    if runtime.local_rank == 0:
        data = open_dataset(recipe.data, **options)
    if runtime.world_size > 1:
        dist.barrier()
    if runtime.local_rank != 0:
        data = open_dataset(recipe.data, **options)
    if 0 < recipe.model.vocab_size < data.vocab_size:
        raise ValueError(
            f"the data has a vocabulary of {data.vocab_size} tokens, model.vocab_size is "
            f"{recipe.model.vocab_size}; leave it out, and it is that of the data"
        )
    if recipe.train.eval_interval:
        data.held_out()  # raises now rather than at the first evaluation
    return data


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold a lock on `run_dir`, wherever it is moved: two jobs of one name would mix their checkpoints."""
    descriptor = open_directory(run_dir)
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
    """Rename the directory of an earlier run of this name, so that a new run does not mix with it."""
    other = next(p for i in count(1) if not (p := run_dir.with_name(f"{run_dir.name}.{i}")).exists())
    return run_dir.rename(other)


def _describe(recipe: Recipe, runtime: Runtime, trainer: Trainer) -> str:
    grid, layout = trainer.groups.grid, recipe.parallel
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
    """Return the expert load (max/mean) of each layer in the last recorded steps."""
    highest, lowest = (", ".join(f"{load:.2f}" for load in last[key]) for key in ("max_load", "min_load"))
    return f"expert load by layer, max/mean: {highest}; min/mean: {lowest}"


def _report(recipe: Recipe, run_dir: Path, evaluation: Evaluation | None, sample: str | None) -> None:
    if evaluation is not None and recipe.model.bert is not None:
        perplexity = math.exp(min(evaluation.loss, 100.0))
        to_stdout(
            f"held-out loss {evaluation.loss:.4f} nats per masked token, a perplexity of {perplexity:.2f}"
        )
    elif (
        evaluation is not None and evaluation.unigram_entropy is None
    ):  # of Megatron's files: no text is there
        to_stdout(f"held-out loss {evaluation.loss:.4f} nats per token")
    elif evaluation is not None:
        assert evaluation.unigram_entropy is not None and evaluation.loss_per_byte is not None
        below = evaluation.unigram_entropy - evaluation.loss_per_byte
        side = "below" if below >= 0 else "above"
        to_stdout(
            f"held-out loss {evaluation.loss_per_byte:.4f} nats per byte, {abs(below):.2f} {side} the "
            f"unigram entropy of the same text, {evaluation.unigram_entropy:.4f}"
        )
    metrics, title = run_dir / "metrics.jsonl", recipe.train.name
    pictures = {"loss plot": plot_loss(metrics, run_dir / "loss.png", title=title)}
    if loads := [record for record in read_metrics(metrics) if record["kind"] == "experts"]:
        to_stdout(_describe_loads(loads[-1]))
        pictures["load plot"] = plot_loads(metrics, run_dir / "load.png", title=title)
    drawn = [f"{name} {path}" for name, path in pictures.items() if path]
    to_stdout(", ".join([f"metrics in {metrics}", *drawn]))
    if sample is not None:
        to_stdout(f"a sample:\n{SAMPLE_PROMPT}{sample}")
