"""The names that a profiler shows: ops, segments, collectives and phases of training; and what they cost."""

from __future__ import annotations

import re
import timeit
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fastmp import profiling
from fastmp.config import CheckpointConfig, GPTConfig, OptimizerConfig, TrainConfig
from fastmp.distributed.collectives import gather_sequence, reduce_from_group, reduce_scatter_sequence
from fastmp.nn.gpt import GPT
from fastmp.nn.transformer import TransformerLayer
from fastmp.ops import bias_gelu
from fastmp.profiling import enable_nvtx, region, traced
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer

CONFIG = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=61, max_seq_len=8)


def names(function) -> list[str]:
    """The ranges of fastmp that a profiler sees in a call, in the order in which they start."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("fastmp.")]


@traced("fastmp.example")
def example(x):
    with region("fastmp.inner"):
        return x + 1


def test_a_range_that_nobody_records_costs_less_than_a_microsecond():
    def marked():
        with region("fastmp.example"):
            pass

    empty = traced("fastmp.example")(lambda: None)
    for function in (marked, empty):
        least = min(timeit.repeat(function, number=10_000, repeat=20)) / 10_000
        assert least < 1e-6, f"{least * 1e9:.0f} ns"


def test_ops_are_ranges_forward_and_backward():
    x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    seen = names(lambda: bias_gelu(x, bias).sum().backward())
    assert seen == ["fastmp.bias_gelu", "fastmp.bias_gelu_backward"]


def test_segments_are_ranges_named_after_layer_and_segment():
    layer, hidden = TransformerLayer(CONFIG), torch.randn(8, 2, 16)
    segments = [name for name in names(lambda: layer(hidden)) if ".segment." in name]
    assert segments == [f"fastmp.segment.TransformerLayer.{s.name}" for s in layer.segments()]


def collective_names(rank, world_size):
    x, group = torch.randn(4, 3, requires_grad=True), dist.group.WORLD

    def communicate():
        reduce_from_group(x, group)
        reduce_scatter_sequence(gather_sequence(x, group), group).sum().backward()

    return names(communicate)


def test_collectives_are_ranges():
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_gather", "reduce_scatter")
    for seen in run_ranks(collective_names, 2):
        assert seen == [f"fastmp.collective.{kind}" for kind in kinds]


class Counting:
    micro_batch_size = 2

    def batch(self, step, microbatch, num_microbatches, dp_rank, dp_size):
        tokens = torch.arange(16).view(2, 8) + step
        return {"tokens": tokens % 61, "targets": (tokens + 1) % 61}

    def validation_batches(self, dp_rank, dp_size, *, max_batches):
        yield self.batch(0, 0, 1, dp_rank, dp_size)


def test_phases_of_training_are_ranges(tmp_path):
    config = TrainConfig(steps=1, global_batch_size=4, eval_interval=1, run_dir=str(tmp_path))
    trainer = Trainer(
        GPT(CONFIG),
        Counting(),
        token_loss,
        config,
        optimizer=OptimizerConfig(warmup_steps=1),
        checkpoint=CheckpointConfig(interval=1),
    )
    phases = [name for name in names(trainer.train) if name.startswith("fastmp.training.")]
    step = ["data", "forward", "backward"] * 2 + ["reduce", "clip", "optimizer"]  # two microbatches
    # the checkpoint of the last step is begun before its evaluation, and awaited behind it
    assert phases == [f"fastmp.training.{phase}" for phase in (*step, "save", "eval", "save")]


def test_there_are_no_ranges_in_compiled_code():
    layer, hidden = TransformerLayer(CONFIG), torch.randn(8, 2, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = compiled(hidden)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.testing.assert_close(compiled(hidden), expected, rtol=0, atol=0)
    assert not [event.name for event in seen.events() if event.name.startswith("fastmp.")]
    fresh = torch.compile(example, fullgraph=True, backend="aot_eager")
    assert names(lambda: fresh(hidden)) == []


@pytest.fixture
def pushed(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    yield calls
    enable_nvtx(False)


def test_nvtx_ranges_are_there_on_request_and_nest(pushed):
    example(torch.ones(1))
    assert pushed == []
    enable_nvtx()
    example(torch.ones(1))
    assert pushed == ["fastmp.example", "fastmp.inner", "pop", "pop"]


def test_a_range_ends_where_its_body_raises(pushed):
    enable_nvtx()
    with pytest.raises(RuntimeError, match="inside"), region("fastmp.example"):
        raise RuntimeError("inside")
    assert pushed == ["fastmp.example", "pop"]


def test_ranges_follow_the_profiler_on_and_off():
    assert region("fastmp.example") is profiling._OFF
    assert names(lambda: [example(torch.ones(1)) for _ in range(2)]) == ["fastmp.example", "fastmp.inner"] * 2
    assert region("fastmp.example") is profiling._OFF


def test_the_page_shows_what_happens(capsys):
    """docs/profiling.md: its Python prints the ranges shown."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "profiling.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    exec(compile(code, "docs/profiling.md", "exec"), {})
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == [
        line.split()[0] for line in shown.splitlines()
    ]
    for name in ("all_reduce", "all_gather", "reduce_scatter", "data", "clip", "eval", "save"):
        assert f"`{name}`" in page
