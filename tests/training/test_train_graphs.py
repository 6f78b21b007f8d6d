"""Training with graphs: late parameters, captures that fail, models of one's own, and the command."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from graphed_trainers import CONFIG, DENSE, EXPERTS, ONE, make_graphed, run
from marks import exhaustive, full
from torch import nn
from train_tools import Samples
from trainer_tools import make_groups

from fastmp.apps import train_main as main
from fastmp.config import (
    GraphConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from fastmp.config.recipe import parse_arguments
from fastmp.cuda_graphs.backends.recording import RecordedGraph, RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.runtime import Runtime
from fastmp.testing.parallel import late_gathers
from fastmp.testing.ranks import run_ranks
from fastmp.training import graphing
from fastmp.training.graphing import make_graphs
from fastmp.training.metrics import read_metrics
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

ON = GraphConfig(enabled=True, verify_every=5)


def late_case(rank, world, grid, layout):
    groups, found = make_groups(world, **grid), []
    on = GraphConfig(enabled=True)
    for gathers, graphs in (
        (nullcontext(), None), (late_gathers(), None), (late_gathers(), on),
        (late_gathers(), replace(on, scope=("full",))),
    ):  # fmt: skip
        options = {"optimizer": OptimizerConfig(bucket_size=1), "steps": 6}
        trainer = make_graphed(graphs, groups, layout, EXPERTS, **options)
        with gathers:
            trainer.train()
        found.append([tensor.detach().clone() for tensor in trainer.model.state_dict().values()])
        if graphs is not None:
            runs = EXPERTS.num_layers // layout.pp if graphs.scope is None else 1
            assert trainer.graphs.num_graphs and len(trainer.graphs.captured_spans[0]) == runs
    assert all(all(map(torch.equal, own, found[0])) for own in found[1:])


@pytest.mark.parametrize("layout", [ONE, *full([ParallelConfig(pp=2)])], ids=("", "pipeline"))
def test_parameters_that_come_late_are_there_when_graphs_read_them(layout):
    """Those of other ranks are nan until they are waited for."""
    run_ranks(late_case, 2 * layout.pp, {"pp": layout.pp}, layout)


class FailsOnRankOne(RecordingBackend):
    """On rank 1 no graph can be made of a forward, or of a backward."""

    of_backward = False

    def graph(self, forward=None, draws=None, **pool):
        if torch.distributed.get_rank() == 1 and (forward is not None) == self.of_backward:
            raise RuntimeError("on purpose")
        return super().graph(forward, draws, **pool)


def one_rank_fails_case(rank, world, grid, layout, of_backward, scope=None, config=CONFIG):
    groups = make_groups(world, **grid)
    FailsOnRankOne.of_backward = of_backward
    with patch.object(graphing, "RecordingBackend", FailsOnRankOne):
        graphed, manager = run(GraphConfig(enabled=True, scope=scope), groups, layout, config)
    eager, _ = run(None, groups, layout, config)
    assert len(graphed) == len(eager) and all(map(torch.equal, graphed, eager))
    return manager.failure, manager.num_graphs, manager.describe()


@pytest.mark.parametrize(
    ("grid", "layout", "of_backward"),
    [
        *full(
            [
                ({"tp": 2}, ParallelConfig(tp=2), True),
                ({"pp": 2}, ParallelConfig(pp=2), True),
            ]
        ),
        *exhaustive([({"tp": 2}, ParallelConfig(tp=2), False)]),
    ],
    ids=("tensor, backward", "pipeline, backward", "tensor, forward"),
)
def test_all_ranks_go_on_eagerly_where_a_capture_fails_on_one(grid, layout, of_backward):
    goes_on_eagerly(run_ranks(one_rank_fails_case, 2, grid, layout, of_backward))


@pytest.mark.full
def test_all_ranks_go_on_eagerly_with_a_loss_that_has_made_its_gradient():
    sequence = ParallelConfig(tp=2, sequence_parallel=True)
    goes_on_eagerly(run_ranks(one_rank_fails_case, 2, {"tp": 2}, sequence, True, ("full",), DENSE))


def goes_on_eagerly(results):
    assert results[0] == results[1]
    failure, num_graphs, line = results[0]
    assert failure.startswith("rank 1: graphs: capture of the ") and "on purpose" in failure
    assert num_graphs == 0 and line == f"no graphs, all runs eagerly: {failure}"


class FailsInTheEnd(RecordingBackend):
    """The capture of a backward fails when its work is done."""

    def graph(self, forward=None, draws=None, **pool):
        graph = super().graph(forward, draws, **pool)
        if forward is not None:
            graph.capture = lambda: failing(RecordedGraph.capture(graph))
        return graph


@contextmanager
def failing(capture):
    with capture:
        yield
        raise torch.OutOfMemoryError("on purpose")


@pytest.mark.parametrize("recompute", (False, *full([True])))
def test_a_loss_that_has_made_its_gradient_runs_backward_again(monkeypatch, recompute):
    monkeypatch.setattr(graphing, "RecordingBackend", FailsInTheEnd)
    layout, whole = ParallelConfig(recompute=recompute), GraphConfig(enabled=True, scope=("full",))
    graphed, manager = run(whole, layout=layout, config=DENSE, steps=4)
    eager, _ = run(None, layout=layout, config=DENSE, steps=4)
    assert "on purpose" in manager.failure
    assert all(map(torch.equal, graphed, eager))


def test_a_manager_of_ones_own_goes_on_eagerly():
    def manage(chains, order, *, rng, **options):
        return GraphManager(chains, order, backend=FailsInTheEnd(rng), fallback=True, **options)

    one = GraphConfig(enabled=True, warmup=1)
    graphed, manager = run(one, config=DENSE, steps=3, graph_manager=manage)
    eager, _ = run(None, config=DENSE, steps=3)
    assert "on purpose" in manager.failure and all(map(torch.equal, graphed, eager))


FULL = GraphConfig(enabled=True, scope=("full",), verify_every=8)


class Odd:
    """Batches of whatever, and a loss of whatever, for a model without a chain of layers."""

    micro_batch_size = 4

    def __init__(self, extra, third):
        self.extra, self.third, self.calls = extra, third, 0

    def batch(self, step, microbatch, num_microbatches, dp_rank, dp_size):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(9 * step + microbatch))
        return {"x": x.double(), **self.extra(step)}

    def loss(self, model, batch):
        self.calls += 1
        return model(batch["x"]).square().sum(), torch.tensor(4) * 1, *self.third(self.calls)


def train_odd(graphs, extra=lambda step: {}, third=lambda calls: ()):
    torch.manual_seed(0)
    data = Odd(extra, third)
    trainer = Trainer(
        nn.Linear(3, 3).double(), data, data.loss, TrainConfig(global_batch_size=8), graphs=graphs
    )
    return [trainer.train_step().grad_norm for _ in range(5)]


def test_any_model_and_what_its_loss_may_take_and_return():
    def extra(step):
        return {"y": torch.zeros(1)} if step == 3 else {}

    assert torch.equal(*(torch.stack(train_odd(graphs, third=lambda _: (None,))) for graphs in (FULL, None)))
    with pytest.raises(ValueError, match="results of the microbatch must be tensors, got 'here'"):
        train_odd(FULL, third=lambda _: ("here",))
    with pytest.raises(ValueError, match="arguments of the microbatch must have one form in all mic"):
        train_odd(FULL, extra)
    with pytest.raises(ValueError, match="results of the microbatch must have one form in all micro"):
        train_odd(FULL, third=lambda calls: (None,) * (calls % 2))


def experts_on_ranks_case(rank, world):
    groups = make_groups(2, ep=2)
    with pytest.raises(
        ValueError, match="scope 'full' cannot be captured, because dispatch, experts, combine"
    ):
        run(FULL, groups)


def test_experts_over_ranks_cannot_be_captured_whole():
    run_ranks(experts_on_ranks_case, 2)


@pytest.fixture
def train_recipe(tmp_path, tokens, monkeypatch):
    """Five steps of the recipe with experts, as a rank of them, or by the command's own `run`."""
    monkeypatch.setattr("fastmp.apps.train_main.SAMPLE_TOKENS", 4)

    def rank_main(rank, world_size, name, *more, command=False):
        arguments = [
            *("--recipe", str(Path(__file__).parents[2] / "configs" / "moe-small.toml")),
            *("--tp", str(world_size), "--ep", str(world_size), "--steps", "5", "--name", name),
            *("--train.log-interval", "1", "--train.eval-interval", "0", "--checkpoint.interval", "0"),
            *("--train.run-dir", str(tmp_path), "--data.path", str(tokens), *more),
        ]
        recipe = parse_arguments(arguments)
        if command:
            return main.run(recipe, arguments)
        device = torch.device("cpu")
        main.train(recipe, Runtime(rank=rank, world_size=world_size, local_rank=rank, device=device))
        return 0

    return rank_main


@pytest.mark.full
def test_the_recipe_with_experts_has_the_same_losses_with_graphs(tmp_path, capfd, train_recipe):
    run_ranks(train_recipe, 2, "eager")
    assert "graphs of" not in capfd.readouterr().out
    run_ranks(train_recipe, 2, "graphs", "--graphs", "--graphs.verify-every", "4")
    assert "step 3: 8 graphs of 4 spans of segments" in capfd.readouterr().out
    assert len(losses(tmp_path / "eager")) == 5
    assert losses(tmp_path / "graphs") == losses(tmp_path / "eager")


@pytest.mark.full
def test_the_command_trains_and_evaluates_in_one_graph_a_step(tmp_path, capfd, train_recipe):
    evaluated = ["--train.eval-interval", "2"]
    assert train_recipe(0, 1, "eager", *evaluated, command=True) == 0
    whole = ["--graphs", "--graphs.scope", "full_step", "--graphs.evaluation", *evaluated]
    assert train_recipe(0, 1, "graphs", *whole, command=True) == 0
    assert "step 3: 1 graph of the whole step, 0." in capfd.readouterr().out
    assert len(losses(tmp_path / "eager")) == 5
    assert losses(tmp_path / "graphs") == losses(tmp_path / "eager")
    of_kind = [
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["kind"] == "eval"]
        for name in ("eager", "graphs")
    ]
    assert of_kind[0] == of_kind[1] and len(of_kind[0]) == 3


def losses(run_dir):
    keys = "step", "loss", "grad_norm"
    records = read_metrics(run_dir / "metrics.jsonl")
    return [[record[key] for key in keys] for record in records if record["kind"] == "train"]


@pytest.mark.parametrize("scope", ([], *full([["--graphs.scope", "full"]])), ids=("layers", "full"))
def test_the_command_goes_on_eagerly_where_a_capture_fails(tmp_path, capfd, monkeypatch, train_recipe, scope):
    monkeypatch.setattr(graphing, "RecordingBackend", FailsInTheEnd)
    assert train_recipe(0, 1, "eager", command=True) == 0
    assert train_recipe(0, 1, "graphs", "--graphs", *scope, command=True) == 0
    lines = capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if "all runs eagerly" in line]
    assert line.startswith("step 3: no graphs, all runs eagerly: graphs: capture of the backward of")
    assert "on purpose" in line
    assert len(losses(tmp_path / "eager")) == 5
    assert losses(tmp_path / "graphs") == losses(tmp_path / "eager")


@pytest.mark.parametrize("fails", (False, True), ids=("well", "in an error"))
def test_graphs_go_where_training_ends(train_recipe, monkeypatch, fails):
    trainers, steps = [], Trainer.train

    def watched(trainer, *args, **options):
        trainers.append(trainer)
        steps(trainer, *args, **options)
        assert trainer.graphs.num_graphs == 2
        if fails:
            raise ArithmeticError("on purpose")

    monkeypatch.setattr(Trainer, "train", watched)
    with pytest.raises(ArithmeticError, match="on purpose") if fails else nullcontext():
        train_recipe(0, 1, "one", "--graphs")
    (trainer,) = trainers
    assert trainer.graphs.num_graphs == 0
    trainer.train_step()
    trainer.close()


@pytest.mark.parametrize("own", [None, "0", "1"])
def test_nccl_registers_no_buffers_of_graphs_unless_told_to(monkeypatch, own):
    """A rank whose capture fails would not come where NCCL's hosts meet to register."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", own or "")
    if own is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    error, says = AttributeError, "overlap"  # it goes on to the model, of which there is none
    if own == "1":
        error, says = ValueError, r"expandable_segments:True .* need NCCL_GRAPH_REGISTER=0"
    with pytest.raises(error, match=says):
        make_graphs(None, ON, rng=None, device=torch.device("cuda"))
    assert os.environ["NCCL_GRAPH_REGISTER"] == (own or "0")


def test_the_gpu_of_the_trainer_becomes_the_current_device(monkeypatch):
    """Before anything is moved there; by stand-ins, with a model that stays on the CPU."""
    done = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr(nn.Module, "to", lambda module, device, dtype: done.append(f"to {device}"))
    config = TrainConfig(global_batch_size=4, eval_interval=0)
    for device in ("cuda:1", "cuda", "cpu", None):
        trainer = Trainer(nn.Linear(2, 2), Samples(4), lambda *_: None, config, device=device)
        trainer.close()
    assert done == ["cuda:1", "to cuda:1", "to cuda", "to cpu"]


def test_models_without_a_chain_of_layers():
    message = "graphs need a model whose layers are a LayerChain, or scope 'full'; Linear has none"
    with pytest.raises(ValueError, match=message):
        config = TrainConfig(global_batch_size=4)
        Trainer(nn.Linear(4, 4), Samples(4), lambda model, batch: None, config, graphs=ON)


def test_values_that_make_no_sense():
    with pytest.raises(
        ValueError, match=r"warmup must be positive, got 0\n.*verify_every must not be neg.*-1"
    ):
        GraphConfig(warmup=0, verify_every=-1)
    with pytest.raises(ValueError, match="scope 'full' is of impl 'fastmp' only, got impl 'transformer_eng"):
        GraphConfig(scope=("full",), impl="transformer_engine")
    with pytest.raises(ValueError, match=r"scope \['mlp'\] names no segment; choose from \['attention'"):
        run(GraphConfig(enabled=True, scope=("mlp",)))
