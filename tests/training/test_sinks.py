"""Sinks of metrics: what they are given, that a resumed run goes on in them, and that none ends a run."""

from __future__ import annotations

import importlib.util
import io
import json
from typing import ClassVar

import pytest

from fastmp.config import SINKS, TrainConfig
from fastmp.training import sinks as sinks_module
from fastmp.training.metrics import RunInfo, TrainLog, read_metrics
from fastmp.training.sinks import Sinks, check_sinks

RUN = RunInfo(total_steps=8, tokens_per_step=1000)


def needs(name):
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed: pip install {name}")


def log_run(folder, names, steps, start=0, rank=0):
    """A run whose loss is 10 x its step, plus `start`; a loss that is not finite, and lists of experts."""
    with TrainLog(
        folder, RUN, log_interval=1, start_step=start, rank=rank, stream=io.StringIO(),
        sinks=lambda: Sinks(names, folder, start_step=start, config={"train": {"steps": 8}}),
    ) as log:  # fmt: skip
        for step in steps:
            log.step(step, loss=10.0 * step + start, grad_norm=float("nan"), lr=1e-3)
            log.record("experts", step, max_load=[1.5, 2.0])


class Recorder:
    """A sink that keeps what it is given, and fails where it is told to."""

    failing = ""
    opened: ClassVar[list[Recorder]] = []

    def __init__(self, directory, start_step, config):
        if self.failing == "open":
            raise ConnectionError("no route")
        self.start_step, self.config, self.written, self.closed = start_step, config, [], 0
        self.opened.append(self)

    def write(self, step, numbers):
        if self.failing == "write" and step == 2:
            raise OSError("disk full")
        self.written.append((step, dict(numbers)))

    def close(self):
        self.closed += 1
        if self.failing == "close":
            raise OSError("late")


@pytest.fixture
def recorders(monkeypatch):
    """A sound sink, and another that the test may make fail."""
    kinds = {name: type(name, (Recorder,), {"opened": []}) for name in ("wandb", "tensorboard")}
    monkeypatch.setattr(sinks_module, "_KINDS", kinds)
    return kinds


def test_a_sink_gets_the_numbers_of_all_records(recorders, tmp_path):
    log_run(tmp_path, ["wandb"], [1, 2])
    (sink,) = recorders["wandb"].opened
    assert sink.config == {"train": {"steps": 8}} and sink.closed == 1
    assert [step for step, _ in sink.written] == [1, 1, 2, 2]
    train, experts = sink.written[2][1], sink.written[3][1]
    assert train["train/loss"] == 20.0 and train["train/lr"] == 1e-3 and "train/grad_norm" not in train
    assert experts == {"experts/max_load/0": 1.5, "experts/max_load/1": 2.0}


@pytest.mark.parametrize(("failing", "written"), [("open", None), ("write", 2), ("close", 8)])
def test_a_sink_that_fails_is_one_warning(recorders, tmp_path, failing, written):
    recorders["tensorboard"].failing = failing
    with pytest.warns(RuntimeWarning, match="tensorboard gets no metrics from here on") as caught:
        log_run(tmp_path, SINKS, [1, 2, 3, 4])
    assert len(caught) == 1
    assert [len(sink.written) for sink in recorders["tensorboard"].opened] == ([written] if written else [])
    (sound,) = recorders["wandb"].opened
    assert len(sound.written) == 8 and sound.closed == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 9


def test_only_the_first_rank_opens_any(recorders, tmp_path):
    log_run(tmp_path, SINKS, [1], rank=1)
    assert not recorders["wandb"].opened and not recorders["tensorboard"].opened


def test_an_absent_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"sinks: wandb is not installed: pip install wandb"):
        check_sinks(["wandb"])
    check_sinks([])


def test_an_unknown_sink():
    with pytest.raises(ValueError, match="sinks must be one of tensorboard, wandb, got 'mlflow'"):
        TrainConfig(sinks=("wandb", "mlflow"))


@needs("tensorboard")
@pytest.mark.full
def test_tensorboard_goes_on_after_a_resume(tmp_path):
    """The second run starts behind step 3: its values take the place of those past it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run(tmp_path, ["tensorboard"], range(1, 6))
    log_run(tmp_path, ["tensorboard"], range(4, 9), start=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [*((s, 10.0 * s) for s in (1, 2, 3)), *((s, 10.0 * s + 3) for s in range(4, 9))]
    assert "train/grad_norm" not in events.Tags()["scalars"]


def wandb_history(path):
    """The steps and losses that an offline run has on disk, and its id.

    Behind a header of 7 bytes, each record has 7 of its own: a checksum, its length in two, and a 1.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    rest, rows, identity = path.read_bytes()[7:], [], ""
    while rest:
        length, whole = int.from_bytes(rest[4:6], "little"), rest[6]
        assert whole == 1, "a record in pieces"
        record, rest = Record.FromString(rest[7 : 7 + length]), rest[7 + length :]
        identity = record.run.run_id or identity
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "train/loss" in items:
            rows.append((json.loads(items["step"]), json.loads(items["train/loss"])))
    return rows, identity


@needs("wandb")
@pytest.mark.full
def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    log_run(tmp_path, ["wandb"], [1, 2])
    first = set(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    log_run(tmp_path, ["wandb"], [2, 3], start=1)
    (second,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - first
    (path,) = first
    (rows, identity), (more, again) = wandb_history(path), wandb_history(second)
    assert identity == again == (tmp_path / "wandb-id").read_text().strip()
    assert rows == [(1, 10.0), (2, 20.0)] and more == [(2, 21.0), (3, 31.0)]
