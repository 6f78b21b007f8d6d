"""Saving while training goes on: what is saved, what a failure costs, what the log says."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from trainer_tools import Regression, make_groups, make_small, plain_model, regression_loss

from fastmp.config import CheckpointConfig, OptimizerConfig, TrainConfig
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint import checkpointer
from fastmp.training.checkpoint.diff import differences
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.microbatches import PipelineLoss
from fastmp.training.stopping import StopRequests
from fastmp.training.trainer import Trainer

EVERY_STEP = CheckpointConfig(interval=1, keep=0)


class Log:
    """The notes that a trainer makes."""

    def __init__(self, after=lambda note: None):
        self.notes, self._after = [], after

    def note(self, text):
        self.notes.append(text)
        self._after(text)

    def progress(self, step):
        pass

    def due(self, step):
        return False

    def paused(self):
        return torch.no_grad()


@pytest.fixture
def slow_disk(monkeypatch):
    write = os.write

    def slow(*arguments):
        time.sleep(0.01)
        return write(*arguments)

    monkeypatch.setattr(os, "write", slow)


def make_plain(tmp_path, name, config):
    train = TrainConfig(steps=4, global_batch_size=8, eval_interval=0, name=name, run_dir=str(tmp_path))
    options = {"optimizer": OptimizerConfig(warmup_steps=1), "checkpoint": config}
    return Trainer(plain_model(), Regression(), regression_loss, train, **options)


def checkpoints(tmp_path, name):
    return sorted((tmp_path / name / "checkpoints").glob("step-*"))


def test_what_is_written_slowly_is_the_step_that_it_says(tmp_path, slow_disk):
    for name, config in (("later", EVERY_STEP), ("at once", replace(EVERY_STEP, asynchronous=False))):
        make_plain(tmp_path, name, config).train(Log())
    pairs = list(zip(checkpoints(tmp_path, "later"), checkpoints(tmp_path, "at once"), strict=True))
    assert len(pairs) == 4
    for later, at_once in pairs:
        assert not list(differences(later, at_once, random=True))
    assert list(differences(pairs[0][0], pairs[1][0]))


@pytest.mark.full
def test_shards_of_ranks_are_written_slowly_as_they_were(tmp_path, slow_disk):
    def rank_main(rank, world_size):
        for name, config in (("later", EVERY_STEP), ("now", replace(EVERY_STEP, asynchronous=False))):
            trainer = make_small(
                make_groups(world_size), steps=3, name=name, run_dir=str(tmp_path), checkpoint=config
            )
            trainer.train()
            trainer.close()

    run_ranks(rank_main, 2)
    pairs = list(zip(checkpoints(tmp_path, "later"), checkpoints(tmp_path, "now"), strict=True))
    assert len(pairs) == 3
    for later, now in pairs:
        assert not list(differences(later, now, random=True))


@pytest.fixture
def disk(monkeypatch):
    """A function that fills the disk, or empties it: files of more than 100 bytes fail, or not."""
    monkeypatch.setattr(checkpointer, "PAUSE", 0.01)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(full):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if full else limit[0], limit[1]))

    yield fill
    fill(False)
    signal.signal(signal.SIGXFSZ, before)


def filling(trainer, disk, is_full):
    """Return a `before_step` that waits for the last save, and fills the disk if `is_full(step)`."""

    def before_step(step):
        trainer.saving.checkpointer.settle()
        disk(is_full(step))

    return before_step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_is_said_and_the_run_goes_on(tmp_path, disk, asynchronous):
    log = Log()
    trainer = make_plain(tmp_path, "run", replace(EVERY_STEP, asynchronous=asynchronous))
    before_step = filling(trainer, disk, lambda step: step == 1)  # while the second step is saved

    trainer.train(log, before_step=before_step)
    assert [int(path.name[5:]) for path in checkpoints(tmp_path, "run")] == [1, 3, 4]
    failed = [note for note in log.notes if "saved" not in note]
    assert len(failed) == 3 and all(note.startswith("step 2: checkpoint: cannot write in") for note in failed)
    assert failed[-1].endswith("given up (1 in a row)")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_first_failure_is_said_at_once(tmp_path, disk, monkeypatch, asynchronous):
    """Before the next attempt, while the run waits for the save; and after so many it is given up."""
    log = Log()

    def pause(seconds):
        told = [note for note in log.notes if "trying again" in note]
        for _ in range(100):
            if len(told) == len(seen) + 1:
                break
            sleep(0.05)
            told = [note for note in log.notes if "trying again" in note]
        seen.append(len(told))

    seen, sleep = [], time.sleep
    config = replace(EVERY_STEP, asynchronous=asynchronous, attempts=4)
    trainer = make_plain(tmp_path, "run", config)
    monkeypatch.setattr(checkpointer.time, "sleep", pause)
    before_step = filling(trainer, disk, lambda step: step == 1)

    trainer.train(log, before_step=before_step)
    assert seen == [1, 2, 3]
    failed = [note for note in log.notes if "saved" not in note]
    assert len(failed) == 4 and failed[-1].endswith("given up (1 in a row)")


@pytest.mark.parametrize("interval", [3, 4])  # of four steps: the last one is due by itself, or not
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_last_save_that_fails_is_an_error(tmp_path, disk, asynchronous, interval):
    log = Log()
    trainer = make_plain(tmp_path, "run", replace(EVERY_STEP, interval=interval, asynchronous=asynchronous))
    before_step = filling(trainer, disk, lambda step: step >= 3)  # also while the fourth step is saved

    with pytest.raises(OSError, match=r"cannot write in .*File too large"):
        trainer.train(log, before_step=before_step)
    assert [int(path.name[5:]) for path in checkpoints(tmp_path, "run")] == [3][: interval == 3]
    assert "given up" in log.notes[-1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_last_save_that_failed_is_made_once_more(tmp_path, disk, asynchronous):
    trainer = make_plain(tmp_path, "run", replace(EVERY_STEP, asynchronous=asynchronous))
    # the disk is full while the fourth step is saved for the first time
    before_step = filling(trainer, disk, lambda step: step == 3)

    trainer.train(Log(), before_step=before_step)
    assert [int(path.name[5:]) for path in checkpoints(tmp_path, "run")] == [1, 2, 3, 4]


def test_without_a_log_failures_are_said_on_stderr(tmp_path, disk, capfd):
    trainer = make_plain(tmp_path, "run", EVERY_STEP)
    before_step = filling(trainer, disk, lambda step: step == 1)

    trainer.train(before_step=before_step)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 3 and said[-1].startswith("warning: step 2: checkpoint: cannot write in")


def test_what_is_changed_before_a_step_is_not_in_the_checkpoint_before(tmp_path, slow_disk):
    trainer = make_plain(tmp_path, "run", EVERY_STEP)
    weight, seen = next(trainer.model.parameters()), {}

    def before_step(step):
        seen[step] = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()

    trainer.train(Log(), before_step=before_step)
    for path in checkpoints(tmp_path, "run"):
        saved = CheckpointReader(path).tensor("model/0.weight")
        assert torch.equal(saved, seen[int(path.name[5:])])


def test_a_run_that_starts_from_another_ones_last_step_saves_it_and_its_own_not_again(tmp_path):
    make_plain(tmp_path, "run", EVERY_STEP).train(Log())
    first = checkpoints(tmp_path, "run")
    for name, path, expected in (("run", None, [1, 2, 3, 4]), ("other", first[-1], [4])):
        trainer = make_plain(tmp_path, name, EVERY_STEP)
        assert trainer.resume(path).step == 4
        trainer.train(Log())
        assert [int(path.name[5:]) for path in checkpoints(tmp_path, name)] == expected


class Odd(nn.Module):
    """A model with parameters and buffers that have no element, one, or a dtype of their own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("nothing", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x):
        return self.layer(x) * self.scale + self.frozen + self.none.sum()


def test_odd_parameters_and_buffers_come_back(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        train = TrainConfig(steps=4, global_batch_size=8, eval_interval=0, run_dir=str(tmp_path))
        options = {"optimizer": OptimizerConfig(warmup_steps=1, clip_grad_norm=0.0)}
        return Trainer(Odd(), Regression(), regression_loss, train, **options)

    first = make(1)
    first.train_step()
    first.model.flags.logical_not_()
    first.save()
    second = make(2)
    assert second.resume().step == 1
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert first.train_step().loss == second.train_step().loss


def test_stages_with_buffers_of_one_name_are_kept_apart(tmp_path):
    """Two stages with parameters of their own names; the buffers have the same one."""

    class Stage(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.add_module(f"layer{number}", nn.Linear(6, 6, dtype=torch.float64))
            self.register_buffer("offset", torch.full((2,), float(number)))

        def forward(self, x):
            return next(self.children())(x)

    def rank_main(rank, world_size):
        groups = make_groups(world_size, pp=2)
        loss = PipelineLoss(
            inputs=lambda batch: batch["x"], loss=lambda y, batch: (y.square().sum(), torch.tensor(y.numel()))
        )
        train = TrainConfig(steps=4, global_batch_size=8, eval_interval=0, run_dir=str(tmp_path))
        data = Regression()
        data.batch = lambda *numbers: {"x": torch.ones(4, 6, dtype=torch.float64)}
        trainer = Trainer([Stage(rank)], data, loss, train, groups=groups)
        trainer.train_step()
        trainer.save()
        offset = trainer.model[0].offset
        offset.zero_()
        assert trainer.resume()
        return offset.tolist()

    assert run_ranks(rank_main, 2) == [[0.0, 0.0], [1.0, 1.0]]


def test_a_stop_that_falls_on_a_step_being_saved_waits_for_that(tmp_path, slow_disk):
    trainer = make_plain(tmp_path, "run", EVERY_STEP)
    log, stop = Log(), StopRequests()
    stop.wanted = lambda: "SIGTERM" if trainer.step == 1 else ""
    trainer.train(log, stop=stop)
    assert stop.reason == "SIGTERM"
    assert [int(path.name[5:]) for path in checkpoints(tmp_path, "run")] == [1, 2]
    assert [note.partition(" saved")[0] for note in log.notes] == ["step 1:", "step 2:"]


def test_what_follows_a_checkpoint_is_told_of_it_and_may_fail(tmp_path):
    def after(path, step):
        if step == 2:
            raise OSError("no room")
        return f"told of {path.name}" if step > 2 else ""

    train = TrainConfig(steps=3, global_batch_size=8, eval_interval=0, run_dir=str(tmp_path))
    options = {"optimizer": OptimizerConfig(warmup_steps=1), "checkpoint": EVERY_STEP, "after_save": after}
    log = Log()
    Trainer(plain_model(), Regression(), regression_loss, train, **options).train(log)
    others = [note for note in log.notes if "saved" not in note]
    assert others == ["step 2: OSError: no room", "step 3: told of step-00000003"]
