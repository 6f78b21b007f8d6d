"""A run ends before its last step for a signal, saved, and for gradients that stay non-finite."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from marks import full
from torch import nn
from train_tools import DENSE, arguments, losses, read_until, start
from trainer_tools import make_groups, make_small, make_trainer

from fastmp.apps.cli import main as command
from fastmp.apps.train import main
from fastmp.apps.train_main import train
from fastmp.config import CheckpointConfig, GraphConfig, ParallelConfig
from fastmp.config.recipe import parse_arguments
from fastmp.distributed.runtime import Runtime
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.testing.ranks import run_ranks
from fastmp.training import stopping
from fastmp.training.metrics import read_metrics
from fastmp.training.stopping import REASONS, SAME_PRESS, SkippedSteps, StopRequests
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def poison(trainer, *, rank, first, last, name="layers.1.mlp.up.bias"):
    """From step `first` to `last` (counted from 0) the gradient of one parameter of one rank is NaN."""
    param = trainer.grads.parameters[name]
    param.register_hook(
        lambda grad: (
            grad * math.nan if trainer.groups.rank == rank and first <= trainer.step <= last else grad
        )
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_whose_steps_are_all_skipped_stops_and_names_the_parameter_and_the_rank(tmp_path, world_size):
    def rank_main(rank, world_size):
        trainer = make_small(
            make_groups(world_size),
            steps=40,
            checkpoint=CheckpointConfig(interval=2),
            max_skipped_steps=5,
            run_dir=str(tmp_path),
        )
        poison(trainer, rank=world_size - 1, first=4, last=39)
        with pytest.raises(FloatingPointError) as error:
            trainer.train()
        assert trainer.step == 9 and trainer.optimizer.skipped_steps == 5
        return str(error.value)

    says = [rank_main(0, 1)] if world_size == 1 else run_ranks(rank_main, world_size)
    for message in says:
        assert "stopped after step 9: the gradient was not finite in the last 5 steps" in message
        assert f"the gradient of layers.1.mlp.up.bias on rank {world_size - 1} is not finite" in message


@pytest.mark.parametrize("shard", [True, False])
def test_whose_gradient_it_was_is_found_wherever_it_lies(shard):
    """Any parameter and either rank, elements of either rank's shard; where all have all sums, the name."""

    def rank_main(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 3))
        options = {"dp_group": dist.group.WORLD, "shard": shard, "bucket_size": 200}
        grads, found = GradBuffer(model.named_parameters(), **options), []
        skipped, nobody = SkippedSteps(grads, world_size), torch.zeros(len(REASONS))
        for name, param in model.named_parameters():
            for culprit, element in ((0, 0), (0, -1), (1, 0), (1, -1)):
                grads.zero()
                if rank == culprit:
                    param.main_grad.view(-1)[element] = math.inf
                grads.reduce()
                skipped.add(len(found), torch.tensor(True), None, nobody)
                found.append((name, culprit, skipped.read()))
        grads.zero()
        grads.reduce()
        skipped.add(99, torch.tensor(False), None, nobody)
        assert skipped.read() == [] and skipped.in_a_row == 0
        return found

    left, right = run_ranks(rank_main, 2)
    assert left == right and len(left) == 24
    for step, (name, culprit, lines) in enumerate(left):
        where = f" on rank {culprit}" if shard else ", summed over ranks,"
        assert lines == [f"step {step}: skipped: the gradient of {name}{where} is not finite"]


@pytest.mark.parametrize(("limit", "last"), [(5, 3), (0, 11)], ids=["fewer in a row", "no limit"])
def test_skipped_steps_do_not_stop_a_run(limit, last):
    trainer = make_small(steps=12, max_skipped_steps=limit)
    poison(trainer, rank=0, first=0, last=last)
    poison(trainer, rank=0, first=5, last=8)  # four, one that counts, four more
    trainer.train()
    assert trainer.step == 12 and trainer.optimizer.skipped_steps == (8 if limit else 12)


def test_weights_that_are_not_finite_are_said_to_be_and_the_last_good_checkpoint_stays(tmp_path):
    trainer = make_small(
        steps=40, checkpoint=CheckpointConfig(interval=1), max_skipped_steps=6, run_dir=str(tmp_path)
    )
    trainer.train_step()
    trainer.save()
    with torch.no_grad():
        trainer.grads.parameters["layers.0.mlp.up.weight"][0, 0] = math.inf
    with pytest.raises(FloatingPointError, match=r"values of layers\.0\.mlp\.up\.weight on rank 0 are not"):
        trainer.train()
    again = make_small(run_dir=str(tmp_path))
    assert again.resume() and again.step == 1
    assert all(torch.isfinite(param).all() for param in again.model.parameters())


def test_a_run_that_cannot_go_on_fails_with_one_line(tmp_path, tokens, capsys):
    options = {
        "optimizer__lr": 1e30,
        "optimizer__min_lr": 0.0,
        "train__steps": 40,
        "train__max_skipped_steps": 3,
    }
    assert main(arguments(tmp_path, tokens, **options)) == 1
    said = capsys.readouterr().err
    assert "the gradient was not finite in the last 3 steps" in said and len(said.splitlines()) == 1
    assert len(losses(tmp_path / "tiny")) < 10


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (signal.SIGTERM, signal.SIGINT, KeyboardInterrupt),
        (signal.SIGINT, signal.SIGTERM, SystemExit),
        (signal.SIGUSR1, signal.SIGTERM, SystemExit),
    ],
)
def test_the_first_signal_is_a_request_and_the_second_ends_at_once(first, second, error):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(error) as ended, StopRequests() as stop:
        assert stop.wanted() == "" and stop.reason == ""
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGUSR1)  # never ends a process
        assert stop.wanted() == ("Ctrl-C" if first == signal.SIGINT else first.name)
        os.kill(os.getpid(), second)
    assert getattr(ended.value, "code", 143) == 143
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("stderr", ["full", "closed"])
def test_a_signal_is_a_request_where_stderr_cannot_be_written(stderr):
    kept = os.dup(2)
    try:
        if stderr == "closed":
            os.close(2)
        else:
            with open("/dev/full", "wb", buffering=0) as full_disk:
                os.dup2(full_disk.fileno(), 2)
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wanted() == "SIGTERM"
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("world_size", "seconds", "ends"),
    [(1, 0.0, True), (1, 9.0, True), (2, 0.0, False), (2, SAME_PRESS, False), (2, SAME_PRESS + 0.1, True)],
)
def test_a_signal_that_a_launcher_passes_on_is_no_second_one(monkeypatch, second, world_size, seconds, ends):
    """A terminal's Ctrl-C reaches launcher and ranks; the launcher's own signal follows within a moment."""
    clock = [1000.0]
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stop, error = StopRequests(0, world_size), None
    try:
        with stop:
            os.kill(os.getpid(), signal.SIGINT)
            clock[0] += seconds
            os.kill(os.getpid(), second)
    except (KeyboardInterrupt, SystemExit) as ended:  # pytest would end, too
        error = type(ended)
    assert error == ((KeyboardInterrupt if second == signal.SIGINT else SystemExit) if ends else None)
    assert stop.wanted() == "Ctrl-C"  # the first one counts


def test_of_several_reasons_the_strongest_counts():
    """A time limit, then SIGTERM, SIGUSR1, Ctrl-C: batch systems send SIGUSR1 ahead of SIGTERM."""
    weakest_first = ["Ctrl-C", "SIGUSR1", "SIGTERM", "time limit"]
    assert sorted(REASONS) == sorted(weakest_first)
    grads = GradBuffer(nn.Linear(2, 2).named_parameters())
    for several in itertools.chain(*(itertools.combinations(weakest_first, n) for n in (1, 2, 4))):
        steps = SkippedSteps(grads, 1)
        asked = torch.tensor([float(reason in several) for reason in REASONS])
        steps.add(1, torch.tensor(False), None, asked)
        assert steps.read() == [] and steps.stop_reason == several[-1]


def test_in_another_thread_a_run_leaves_signals_alone():
    """Ray Train calls a program in a thread of its worker, where Python allows no handlers."""
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        stop = pool.submit(StopRequests().__enter__).result(timeout=10)
        assert signal.getsignal(signal.SIGTERM) is before and not stop.wanted()
        pool.submit(stop.__exit__).result(timeout=10)


@pytest.mark.full
def test_all_ranks_stop_after_one_step_if_any_of_them_is_asked(tmp_path, tokens):
    """Rank 1 gets the signal in its third step; both save that step, and what follows is a run in one go."""
    changes = {"parallel__tp": 2, "train__eval_interval": 0}

    def rank_main(rank, world_size, name, *extra):
        recipe = parse_arguments([*arguments(tmp_path, tokens, name, **changes), *extra])
        runtime = Runtime(rank=rank, world_size=world_size, local_rank=rank, device=torch.device("cpu"))
        train(recipe, runtime)

    def asked(rank, world_size):
        step = Trainer._train_step

        def train_step(self):
            if rank == 1 and self.step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            return step(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_train_step", train_step)
            return rank_main(rank, world_size, "stopped")

    run_ranks(rank_main, 2, "straight")
    assert run_ranks(asked, 2) == [None, None]
    assert [step for step, _ in losses(tmp_path / "stopped")] == [1, 2, 3]
    run_ranks(rank_main, 2, "stopped", "--resume", "auto")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")


def test_a_time_limit_saves_and_says_the_next_command(tmp_path, tokens, capsys):
    options = arguments(tmp_path, tokens, train__steps=100_000, train__log_interval=1000)
    assert main([*options, "--max-time", "0:01"]) == 0
    said = capsys.readouterr().out
    step = re.search(
        r"stopped after step (\d+) \(time limit\); to go on: fastmp train (.*) --resume auto$", said, re.M
    )
    assert step is not None and 1 < int(step[1]) < 100_000
    assert "--max-time 0:01" in step[2] and "a sample" not in said
    assert (tmp_path / "tiny" / "checkpoints" / f"step-{int(step[1]):08d}").is_dir()


class LateCopy:
    """Numbers that are read one step later, as those of a GPU are."""

    steps_late = 1

    def __init__(self, numbers):
        self.read = numbers.tolist


@pytest.mark.parametrize(
    "layout", [{"tp": 1}, {"tp": 2}, *full([{"pp": 2}, {"tp": 2, "pp": 2}, {}])], ids=str
)
def test_a_request_of_any_rank_stops_all_of_them_without_a_collective_of_their_own(tmp_path, layout):
    """The last rank is asked in step 4, the first one in step 5, when on a CPU all have stopped."""

    def rank_main(rank, world_size):
        found, over_world, all_reduce = [], [], dist.all_reduce

        def spied(tensor, *args, group=None, **options):
            if group is None or group is dist.group.WORLD:
                over_world.append(tensor.numel())
            return all_reduce(tensor, *args, group=group, **options)

        def wanted():
            last = rank == world_size - 1
            return "SIGTERM" if last and trainer.step >= 3 else "time limit" if trainer.step >= 4 else ""

        for copies in (stopping._HostCopy, LateCopy):
            options = {"steps": 8, "name": copies.__name__, "run_dir": str(tmp_path)}
            if layout == {"tp": 1}:
                trainer = make_small(make_groups(world_size), **options)
            else:
                sizes = ParallelConfig(**layout)
                graphs = None if layout else GraphConfig(enabled=True, scope=("full_step",))
                groups = make_groups(world_size, sizes)
                trainer = make_trainer(groups, sizes, config=DENSE, graphs=graphs, **options)
            stop = StopRequests(rank, world_size)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stopping, "_HostCopy", copies)
                patch.setattr(dist, "all_reduce", spied)
                patch.setattr(stop, "wanted", wanted)
                assert trainer.train(stop=stop) is None
            found.append((trainer.step, stop.reason))
            trainer.close()
        assert (tmp_path / "LateCopy" / "checkpoints" / "step-00000005").is_dir()
        return found, set(over_world)

    for found, over_world in run_ranks(rank_main, 4 if len(layout) == 2 else 2):
        assert found == [(4, "SIGTERM"), (5, "SIGTERM")]
        assert over_world <= {1}  # the norm of sharded gradients


def test_a_time_limit_is_a_request_of_its_own():
    assert StopRequests(0, 1, time.monotonic() + 1e9).wanted() == ""
    assert StopRequests(0, 1, time.monotonic()).wanted() == "time limit"


@pytest.mark.parametrize("number", [signal.SIGINT, *full([signal.SIGTERM, signal.SIGUSR1])])
def test_a_signal_saves_and_says_how_to_resume(tmp_path, tokens, number):
    options = arguments(tmp_path, tokens, train__steps=100_000)
    process = start(options)
    read_until(process, "step      2/")
    os.killpg(process.pid, number)
    said = process.stdout.read()
    assert process.wait(timeout=60) == 0, said
    assert "Traceback" not in said and "a sample" not in said
    assert "saved" in said and "--resume auto" in said
    saved = sorted(path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir())
    steps = [r["step"] for r in read_metrics(tmp_path / "tiny" / "metrics.jsonl") if r["kind"] == "train"]
    assert saved == ["latest", f"step-{steps[-1]:08d}"]


@pytest.mark.parametrize("stopped", [False, True], ids=["complete", "stopped"])
def test_a_signal_after_the_last_save_is_no_failure(tmp_path, tokens, monkeypatch, stopped):
    """Slurm's notice comes while the run draws its sample, or while a stopped run closes its log."""

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(30)

    options = arguments(tmp_path, tokens, train__steps=2, train__eval_interval=0, checkpoint__interval=2)
    if not (child := os.fork()):
        try:
            if stopped:
                options += ["--max-time", "0:01", "--train.steps", "100000", "--checkpoint.interval", "0"]
                monkeypatch.setattr("fastmp.apps.train_main._next_command", interrupted)
            else:
                monkeypatch.setattr("fastmp.apps.train_main._sample", interrupted)
            command(["train", *options])
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "tiny" / "checkpoints" / "latest").exists()


def test_a_rank_that_ends_while_the_sample_is_drawn_is_noted(tmp_path, tokens, monkeypatch, capsys):
    """All work is saved, so the run is complete; a line says why it shows no sample."""

    def lost(*arguments):
        raise RuntimeError("[gloo] Connection closed by peer\n [127.0.0.1]:1")

    monkeypatch.setattr("fastmp.apps.train_main._sample", lost)
    assert main(arguments(tmp_path, tokens, train__steps=1, train__eval_interval=0)) == 0
    *_, noted, reported = capsys.readouterr().out.splitlines()
    assert noted == "no sample: a rank ended ([gloo] Connection closed by peer [127.0.0.1]:1)"
    assert reported.startswith("metrics in ")


@pytest.mark.full
@pytest.mark.parametrize(("launched", "number"), [(True, signal.SIGTERM), (False, signal.SIGUSR1)])
def test_a_complete_job_ends_with_0_whatever_signal_comes_late(tmp_path, tokens, number, launched):
    options = arguments(tmp_path, tokens, parallel__tp=1 + launched, checkpoint__interval=6)
    launcher = ("-m", "fastmp", "launch", "--standalone", "--nproc-per-node", "2") if launched else ()
    process = start(options, *launcher)
    read_until(process, "step 6: saved")
    time.sleep(0.1)
    os.kill(process.pid, number)
    said = process.stdout.read()
    assert process.wait(timeout=60) == 0, said
    assert "Traceback" not in said and "another rank is gone" not in said, said


@pytest.mark.full
@pytest.mark.parametrize("everyone", [True, False], ids=["Ctrl-C on a terminal", "SIGTERM to the launcher"])
def test_the_launcher_passes_the_signal_on_and_its_ranks_save(tmp_path, tokens, everyone):
    options = arguments(tmp_path, tokens, train__steps=100_000, parallel__tp=2)
    process = start(options, "-m", "fastmp", "launch", "--standalone", "--nproc-per-node", "2")
    read_until(process, "step      2/")
    if everyone:
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGTERM)
    said = process.stdout.read()
    assert process.wait(timeout=60) == 0, said
    assert "saved" in said and said.count("--resume auto") == 1, said
    assert "Traceback" not in said and "fastmp: rank" not in said, said
    assert (tmp_path / "tiny" / "checkpoints" / "latest").exists()
