"""The log of a run: what is recorded and shown, when tensors are read, and that a restart continues it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fastmp.training.metrics import Display, RunInfo, TrainLog, peak_flops, read_metrics
from fastmp.training.plot import plot_loss, plot_runs

RUN = RunInfo(total_steps=20, tokens_per_step=1000, flops_per_token=2e6, bytes_per_token=4.0)
TRAIN_FIELDS = {
    "kind", "step", "loss", "loss_per_byte", "grad_norm", "lr", "tokens_per_second", "flops_per_second",
    "mfu", "memory_bytes", "eta_seconds", "elapsed_seconds",
}  # fmt: skip


class Clock:
    """A second passes when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def log_run(folder, *, stream=None, steps=range(1, 21), **options):
    clock = Clock()
    with TrainLog(folder, RUN, log_interval=5, stream=stream or io.StringIO(), clock=clock, **options) as log:
        for step in steps:
            clock.now += 2.0
            log.progress(step)
            log.step(step, loss=torch.tensor(8.0 / step), grad_norm=torch.tensor(0.5), lr=1e-3)
            if step % 10 == 0:
                with log.paused():
                    clock.now += 50.0
                    loss = torch.tensor(4.0 / step)
                    log.evaluation(step, loss=loss, loss_per_byte=1.0 / step, unigram_entropy=3.25)
    return folder / "metrics.jsonl"


def test_records(tmp_path):
    records = read_metrics(log_run(tmp_path))
    run, *rest = records
    assert run["kind"] == "run" and run["schema"] == 1 and run["step"] == 0 and run["tokens_per_step"] == 1000
    train = [record for record in rest if record["kind"] == "train"]
    held_out = [record for record in rest if record["kind"] == "eval"]
    assert [record["step"] for record in train] == [1, 5, 10, 15, 20]
    assert [record["step"] for record in held_out] == [10, 20]
    assert all(set(record) == TRAIN_FIELDS for record in train)
    assert train[1]["loss"] == pytest.approx(1.6) and train[1]["loss_per_byte"] == pytest.approx(0.4)
    assert held_out[0]["loss_per_byte"] == pytest.approx(0.1) and held_out[0]["unigram_entropy"] == 3.25


def test_rates_leave_pauses_out(tmp_path):
    train = [r for r in read_metrics(log_run(tmp_path)) if r["kind"] == "train"]
    for record in train:
        assert record["tokens_per_second"] == pytest.approx(500.0)
        assert record["flops_per_second"] == pytest.approx(500.0 * 2e6)
        assert record["eta_seconds"] == pytest.approx((20 - record["step"]) * 2.0)
        assert record["mfu"] is None and record["memory_bytes"] > 1 << 20
    assert train[-1]["elapsed_seconds"] == pytest.approx(90.0)


def test_plain_lines(tmp_path):
    stream = io.StringIO()
    log_run(tmp_path, stream=stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith(
        "step  1/20  loss 8.0000  grad_norm 0.500  lr 1.00e-03  500 tok/s  1 GFLOP/s  "
    )
    assert lines[0].endswith("B  ETA 0:38")
    assert lines[3] == "step 10/20  held-out loss 0.4000 nats/token  0.1000 nats/byte  unigram entropy 3.2500"
    assert len(lines) == 7 and "\x1b" not in stream.getvalue()


def shown_on(width, tmp_path, monkeypatch):
    """The lines that a terminal of `width` columns has in the end."""
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    log_run(tmp_path, stream=stream)
    written = stream.getvalue()
    assert max(map(len, re.split(r"\n|\r\x1b\[K", written))) <= width
    return written, [line.rpartition("\x1b[K")[2] for line in written.split("\n")]


def test_a_terminal_keeps_a_line_of_every_report_above_the_step_that_is_done(tmp_path, monkeypatch):
    written, lines = shown_on(200, tmp_path, monkeypatch)
    assert [line[:10] for line in lines[:3]] == ["step  1/20", "step  5/20", "step 10/20"]
    assert lines[-1] == "" and len(lines) == 8
    assert "lr 1.00e-03  500 tok/s  1 GFLOP/s" in lines[0] and "unigram entropy 3.2500" in lines[3]
    assert "step  7/20  ETA 0:30" in written and not any("step  7/20" in line for line in lines)


def test_a_line_fits_a_narrow_terminal(tmp_path, monkeypatch):
    _, lines = shown_on(64, tmp_path, monkeypatch)
    assert len(lines) == 8 and lines[0] == "step  1/20  loss 8.0000  grad_norm 0.500  500 tok/s  ETA 0:38"
    assert lines[3] == "step 10/20  held-out loss 0.4000 nats/token  0.1000 nats/byte"
    fields = ("step 1000/5000", "loss 3.6564", "expert load 3.64", "grad_norm 2.310", "lr 1.00e-03")
    fields += ("7.63 ktok/s", "70 GFLOP/s", "415 MB", "ETA 1:06:00")
    monkeypatch.setenv("COLUMNS", "90")
    Display(stream := Terminal(), lambda: 0.0).line(
        *fields, first_to_go=("70 GFLOP/s", "415 MB", "lr 1.00e-03")
    )
    kept = "step 1000/5000  loss 3.6564  expert load 3.64  grad_norm 2.310  7.63 ktok/s  ETA 1:06:00"
    assert stream.getvalue() == f"\r\x1b[K{kept}\n"


def test_the_terminal_is_left_clean_after_an_error(tmp_path):
    stream = Terminal()
    with pytest.raises(RuntimeError, match="step failed"):
        with TrainLog(tmp_path, RUN, stream=stream) as log:
            log.step(1, loss=1.0, grad_norm=1.0, lr=1.0)
            log.progress(2)
            assert "step  2/20" in stream.getvalue().rpartition("\x1b[K")[2]
            raise RuntimeError("step failed")
    assert stream.getvalue().endswith("\r\x1b[K")


def test_tensors_are_read_only_where_a_step_is_shown(tmp_path):
    reads = []

    class Watched:
        def __float__(self):
            reads.append(step)
            return 1.0

    with TrainLog(tmp_path, RUN, log_interval=5, stream=io.StringIO()) as log:
        for step in range(1, 21):
            log.step(step, loss=Watched(), grad_norm=1.0, lr=1.0)
        assert reads == [step for step in range(1, 21) if log.due(step)] == [1, 5, 10, 15, 20]


def test_other_ranks_write_and_show_nothing(tmp_path):
    stream = io.StringIO()
    with TrainLog(tmp_path / "r1", RUN, rank=1, stream=stream) as log:
        assert log.due(10) and not log.due(11)  # so that all ranks meet in the same collectives
        log.step(10, loss=float("nan"), grad_norm=1.0, lr=1.0)
        log.evaluation(10, loss=1.0)
        log.note("x")
    assert not (tmp_path / "r1").exists() and not stream.getvalue()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with TrainLog(tmp_path, RUN, stream=io.StringIO()) as log:
        log.step(1, loss=torch.tensor(math.nan), grad_norm=math.inf, lr=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None and record["grad_norm"] is None and record["loss_per_byte"] is None


def test_every_line_is_on_disk_at_once(tmp_path):
    with TrainLog(tmp_path, RUN, stream=io.StringIO()) as log:
        log.step(1, loss=1.0, grad_norm=1.0, lr=1.0)
        assert [record["kind"] for record in read_metrics(tmp_path / "metrics.jsonl")] == ["run", "train"]


def test_the_load_of_ranks_is_of_layers_and_of_pipeline_ranks(tmp_path):
    """Each layer has its busiest rank; a pipeline rank has one for all its layers together."""
    counts = torch.tensor([[6, 0, 1, 1], [1, 1, 5, 1], [2, 2, 2, 2]])
    # Of three pipeline ranks, the first had loads 1.25 and 0.75, then 1.75 and 0.25; the last has no experts.
    moments = torch.tensor([[[2, 2], [1.0, -1.0], [0.625, 0.625]], [[2, 2], [0, 0], [0, 0]], [[0, 0]] * 3])
    experts = SimpleNamespace(aux_loss=0.0, counts=counts, dropped=0, moments=moments, stash=(3, 4))
    run = replace(RUN, ep=2, expert_stages=(0, 0, 1))
    with TrainLog(tmp_path, run, stream=io.StringIO()) as log:
        log.step(1, loss=1.0, grad_norm=1.0, lr=1.0, experts=experts)
    opening, _, record = read_metrics(tmp_path / "metrics.jsonl")
    assert (opening["ep"], opening["expert_stages"]) == (2, [0, 0, 1])
    assert record["rank_load"] == [1.5, 1.5, 1.0]
    assert (record["stash_used"], record["stash_rows"]) == (3, 4)
    assert (record["stage_load"], record["stage_spread"]) == ([1.5, 1.0, 0.0], [0.25, 0.0, 0.0])


def test_a_restart_continues_the_file(tmp_path):
    path = log_run(tmp_path, steps=range(1, 16))
    with path.open("a") as file:
        file.write('{"kind": "train", "ste')  # killed while writing
    log_run(tmp_path, steps=range(11, 21), start_step=10)
    records = read_metrics(path)
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 5, 10, 15, 20]
    assert [r["step"] for r in records if r["kind"] == "run"] == [0, 10]
    assert [r["tokens_per_second"] for r in records if r["kind"] == "train"] == pytest.approx([500.0] * 5)


@pytest.mark.parametrize(
    "record",
    [
        *(
            '{"kind": "train", "step": "1"}',
            '{"kind": "train", "step": -1}',
            '{"kind": "train", "step": true}',
        ),
        *('{"kind": 1, "step": 1}', '{"kind": "train", "step": 1e3}', f'{{"kind": "x", "step": {1 << 63}}}'),
        *('{"kind": "train", "step": 1, "loss": "low"}', '{"kind": "train", "step": 1, "loss": NaN}'),
        *('{"kind": "experts", "step": 1, "max_load": [[1]]}', '[{"kind": "train", "step": 1}]', "[" * 9999),
    ],
)
def test_a_record_that_no_run_writes_is_named(tmp_path, record):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run", "step": 0}\n' + record + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not a metrics record"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_many_restarts_are_read_in_no_more_than_linear_time(tmp_path):
    lines = ['{"kind": "run", "step": 1}\n', '{"kind": "train", "step": 1}\n'] * 50_000
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    began = time.process_time()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 100_000
    assert time.process_time() - began < 20  # by the square: minutes


def test_damaged_metrics_are_named(tmp_path):
    path = log_run(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"kind": "eval"', b"what", 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line \d+ is not a metrics record"):
        read_metrics(path)
    with pytest.raises(ValueError, match=r"absent\.jsonl: cannot be read"):
        read_metrics(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peak(name, peak):
    assert peak_flops(name) == peak


def test_mfu_is_per_device(tmp_path, monkeypatch):
    monkeypatch.setattr("fastmp.training.metrics._device_name", lambda device: "NVIDIA H100 80GB HBM3")
    clock = Clock()
    run = RunInfo(total_steps=4, tokens_per_step=989_000, flops_per_token=2e9, world_size=4)
    stream = io.StringIO()
    with TrainLog(tmp_path, run, stream=stream, clock=clock) as log:
        clock.now += 1.0
        log.step(1, loss=1.0, grad_norm=1.0, lr=1.0)
    assert read_metrics(tmp_path / "metrics.jsonl")[1]["mfu"] == pytest.approx(0.5)
    assert "MFU 50.0%" in stream.getvalue() and "1.98 PFLOP/s" in stream.getvalue()


def test_loss_picture(tmp_path):
    path = log_run(tmp_path)
    out = plot_loss(path, tmp_path / "new" / "loss.png", title="a run")
    assert out.read_bytes().startswith(b"\x89PNG\r\n") and out.stat().st_size > 10_000
    assert [entry.name for entry in out.parent.iterdir()] == ["loss.png"]


def test_losses_of_several_runs_are_one_picture(tmp_path):
    import matplotlib.image

    one, two = log_run(tmp_path / "a"), log_run(tmp_path / "b")
    both = matplotlib.image.imread(
        plot_runs({"one": one, "two": two}, tmp_path / "both.png", title="two runs")
    )
    alone = matplotlib.image.imread(plot_runs({"one": one}, tmp_path / "one.png"))
    assert both.shape == alone.shape and (both != alone).any()


@pytest.mark.full
def test_what_the_picture_draws(tmp_path):
    import matplotlib.image

    with_entropy = matplotlib.image.imread(plot_loss(log_run(tmp_path / "a"), tmp_path / "a.png"))
    path = log_run(tmp_path / "b")
    path.write_text("".join(line for line in path.open() if '"eval"' not in line))
    without = matplotlib.image.imread(plot_loss(path, tmp_path / "b.png"))
    grey = [0x6B / 255, 0x72 / 255, 0x80 / 255]
    orange = [0xC4 / 255, 0x57 / 255, 0x2E / 255]
    for colour in (grey, orange):
        drawn = [
            int((abs(image[..., :3] - colour).max(-1) < 0.02).sum()) for image in (with_entropy, without)
        ]
        assert drawn[0] > drawn[1] + 300  # letters in dark ink have a few grey pixels of their own


def test_no_picture_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert plot_loss(log_run(tmp_path), tmp_path / "loss.png") is None
    printed = capsys.readouterr().err
    assert "matplotlib is missing" in printed and printed.count("\n") == 1
    assert not (tmp_path / "loss.png").exists()


def test_nothing_to_draw_is_an_error(tmp_path):
    with TrainLog(tmp_path, RUN, stream=io.StringIO()):
        pass
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no loss to draw"):
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_metrics_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"),
        TrainLog(tmp_path, RUN, stream=io.StringIO()) as log,
    ):
        log._file.close()
        log._file = open("/dev/full", "w", encoding="utf-8")
        log.step(1, loss=1.0, grad_norm=1.0, lr=1.0)


@pytest.mark.parametrize("size", [0, 10, 300_000])
def test_an_incomplete_last_line_is_cut_off_wherever_it_begins(size, tmp_path):
    whole = b'{"kind": "run", "step": 0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + b"x" * size)
    with TrainLog(tmp_path, RUN, stream=io.StringIO()):
        pass
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert content.startswith(whole + b'{"kind"') and len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_metrics_are_not_written_to_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        TrainLog(tmp_path, RUN, stream=io.StringIO())
