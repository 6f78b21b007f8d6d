"""Training through graphs is eager training, bit for bit, with as many graphs and buffers as planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_tools import DENSE, MOE, SCOPES, assert_same_gpt, train_gpt
from marks import full

from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphError, GraphManager
from fastmp.nn import GPT, Placement
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.schedule import BACKWARD, FORWARD, Schedule, Step

MOST = [SCOPES[0], SCOPES[-1], *full(SCOPES[1:-1])]


@pytest.mark.parametrize("own_buffers", (True, *full([False])), ids=("main_grad", "grad"))
@pytest.mark.parametrize(("config", "scope", "runs"), [*SCOPES[::2], *full(SCOPES[1::2])])
def test_training_is_that_of_the_layers_themselves(config, scope, runs, own_buffers):
    eager = train_gpt(config, graphs=False, own_buffers=own_buffers)
    graphed = train_gpt(config, graphs=True, scope=scope, own_buffers=own_buffers)
    assert_same_gpt(graphed, eager)
    manager = graphed[2]
    assert manager.plan.num_graphs == 2 * runs and manager.plan.inputs() == runs


def test_two_runs_in_a_layer_of_which_one_needs_more_buffers():
    scope = ["attn", "moe_router", "shared_experts"]
    graphed = train_gpt(MOE, graphs=True, scope=scope, steps=4)
    assert_same_gpt(graphed, train_gpt(MOE, graphs=False, steps=4))
    assert graphed[2].plan.num_graphs == 2 * 2 * MOE.num_layers


@pytest.mark.parametrize(("config", "scope", "runs"), MOST)
def test_recomputation_happens_inside_graphs(config, scope, runs):
    """And between them: eagerly, with the layers whole, it gives the same."""
    graphed = train_gpt(config, graphs=True, scope=scope, recompute=True)
    assert_same_gpt(graphed, train_gpt(config, graphs=False, recompute=True))
    kept = train_gpt(config, graphs=True, scope=scope)[2]
    assert graphed[2].backend.nbytes < 0.65 * kept.backend.nbytes
    assert graphed[2].plan == kept.plan


FRONT = ["attention", "router", "preprocess", "shared_experts"]


@pytest.mark.parametrize(
    ("shared", "scope", "times"),
    [(16, FRONT, 4), (16, None, 1), *full([(0, FRONT, 3), (16, ["attn"], 2)])],
)
def test_what_is_kept_of_layers_that_are_recomputed_in_parts(shared, scope, times):
    """In inputs of a layer, for one more microbatch in flight and one more layer."""
    config = replace(MOE, moe=replace(MOE.moe, shared_expert_ffn_hidden_size=shared))

    def held(num_layers, num_microbatches):
        model = GPT(replace(config, num_layers=num_layers), Placement(dtype=torch.float64), recompute=True)
        GradBuffer(model.named_parameters())
        manager = GraphManager(
            [model.layers],
            [Step(kind, i, 0) for kind in (FORWARD, BACKWARD) for i in range(num_microbatches)],
            backend=RecordingBackend(model.rng),
            scope=scope,
            warmup=1,
        )
        ids = torch.zeros(2, 16, dtype=torch.int64)
        for _ in range(2):
            manager.begin_step()
            losses = [model.loss(ids, ids) for _ in range(num_microbatches)]
            for loss in losses:
                (loss.tokens.sum() + loss.aux).backward()
        return manager.static_bytes + manager.backend.nbytes

    one_input = 16 * 2 * config.hidden_size * 8
    more = held(3, 3) - held(3, 2) - held(2, 3) + held(2, 2)
    assert times <= more / one_input < times + 0.15


def managed():
    model = GPT(DENSE)
    manager = GraphManager([model.layers], Schedule(1, 2).order(0), backend=RecordingBackend())

    def microbatch():
        model.loss(
            torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)
        ).sum().backward()

    for _ in range(3):
        manager.begin_step()
        microbatch()
        microbatch()
    return model, manager, microbatch


def test_another_order_than_planned_is_refused():
    model, manager, microbatch = managed()
    manager.begin_step()
    x = torch.zeros(8, 1, 32, requires_grad=True)
    model.layers(x)
    with pytest.raises(GraphError, match=r"forward of chunk 0, .* but the backward of microbatch 0 chunk 0"):
        model.layers(x)
    manager.begin_step()  # a step that has failed is over
    microbatch()
    microbatch()
    with pytest.raises(GraphError, match=r"forward of chunk 0, .* but the end of the step was planned"):
        microbatch()


def test_other_shapes_run_eagerly():
    model, manager, microbatch = managed()

    def step():
        model.zero_grad()
        torch.manual_seed(7)
        ids = torch.zeros(3, 4, dtype=torch.int64)
        model.loss(ids, ids).sum().backward()
        microbatch()
        return [param.grad for param in model.parameters()]

    manager.begin_step()
    mixed = step()
    manager.remove()
    assert all(torch.equal(a, b) for a, b in zip(mixed, step(), strict=True))


def test_a_scope_without_a_segment():
    with pytest.raises(
        ValueError, match=r"scope \['moe'\] names no segment; choose from \['attention', 'attn', 'mlp'\]"
    ):
        GraphManager(
            [GPT(DENSE).layers],
            Schedule(1, 1).order(0),
            backend=RecordingBackend(),
            scope=["moe"],
        )
