"""Components from outside of fastmp, one file each: their specs serve configuration, layers and plans."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
import toy_activation
import toy_dispatcher
import toy_norm
import toy_schedule
from moe_tools import hidden_states, make_moe, plain_moe

from fastmp.config import (
    ACTIVATIONS,
    DISPATCHERS,
    NORMS,
    DataConfig,
    GPTConfig,
    MoEConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.config.recipe import parse_arguments
from fastmp.config.sizes import num_parameters
from fastmp.config.specs import SCHEDULES, load
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT
from fastmp.nn.moe import make_dispatcher
from fastmp.plan import activations, traffic
from fastmp.plan.graphs import graph_facts
from fastmp.plan.layout import problems
from fastmp.plan.parameters import rank_parameters
from fastmp.plan.resources import recipe_facts
from fastmp.plan.segments import all_segments
from fastmp.plan.shapes import shapes_of
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.scope import captured_segments, must_run_eagerly
from fastmp.testing.ranks import run_ranks

MODEL = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=64, max_seq_len=16)
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=8)
SEGMENTS = ["attention", "router", "preprocess", "dispatch", "experts", "combine"]


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    toys = (toy_activation, toy_norm, toy_dispatcher, toy_schedule)
    for registry, toy in zip((ACTIVATIONS, NORMS, DISPATCHERS, SCHEDULES), toys, strict=True):
        monkeypatch.setattr(registry, "_specs", dict(registry._specs))
        toy.register()


def recipe(micro_batch_size=2, **options):
    return Recipe(
        model=replace(MODEL, **options),
        parallel=ParallelConfig(ep=2 if "moe" in options else 1),
        data=DataConfig(seq_len=16, micro_batch_size=micro_batch_size),
        train=TrainConfig(global_batch_size=4 * micro_batch_size, dtype="float32"),
    )


def toy_recipe(**options):
    moe = replace(EXPERTS, dispatcher="static")
    return recipe(activation="reglu", norm="mean_abs", moe=moe, **options)


def test_choices_and_help_have_registered_names(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    toys = ACTIVATIONS["reglu"], NORMS["mean_abs"], DISPATCHERS["static"], SCHEDULES["gpipe"]
    for spec in toys:
        assert f"{spec.name} ({spec.help})" in shown
    with pytest.raises(ValueError, match=f"norm must be one of {', '.join(NORMS)}, got 'other'"):
        replace(MODEL, norm="other")


def test_an_unknown_name_has_no_default():
    for registry in (ACTIVATIONS, NORMS, DISPATCHERS, SCHEDULES):
        with pytest.raises(ValueError, match=f"unknown {registry.kind} 'other': expected one of "):
            registry["other"]
        with pytest.raises(ValueError, match="'other'"):
            registry.get("other")
        with pytest.raises(ValueError, match="is registered already"):
            registry.register(next(iter(registry.values())))


@pytest.mark.parametrize("moe", (None, EXPERTS), ids=("dense", "experts"))
def test_a_norm_and_an_activation_are_in_models_and_plans(moe):
    config = replace(MODEL, norm="mean_abs", activation="reglu", linear_bias=False, moe=moe)
    model = GPT(config)
    out = model(torch.arange(16).unsqueeze(0))
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert "layers.0.mlp_norm.scale" in sizes and sum(sizes.values()) == num_parameters(config, 128)
    made = replace(recipe(), model=config)
    shapes = shapes_of(made, 1)
    planned = {name: facts.size for name, facts in rank_parameters(made, shapes, 0).items()}
    assert planned == sizes
    gelu = replace(made, model=replace(config, norm="layernorm", activation="gelu"))
    rows = 2 * 16
    assert activations.norm(shapes_of(gelu, 1)) - activations.norm(shapes) == rows * 4
    assert activations.mlp(shapes) > activations.mlp(shapes_of(gelu, 1))


def test_a_schedule_is_planned_as_itself():
    """A rank holds the activations of all microbatches, which with 1F1B it does not."""
    kept = {}
    for name in ("gpipe", "1f1b"):
        made = replace(recipe(), parallel=ParallelConfig(pp=2, schedule=name))
        kept[name] = [rank["peak_in_flight"] for rank in recipe_facts(made, 2)["ranks"]]
    assert kept == {"gpipe": [4, 4], "1f1b": [2, 1]}
    with pytest.raises(ValueError, match="gpipe needs vpp 1, got 2"):
        Schedule(2, 4, vpp=2, name="gpipe")


def layer_case(rank, world):
    """Output and gradients of the dispatcher from outside are those of the all-to-all."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    found = []
    for name in ("alltoall", "static"):
        layer, hidden = make_moe(plain_moe(dispatcher=name), groups), hidden_states(4, 2, seed=rank)
        output, _, _ = layer(hidden.requires_grad_())
        output.square().sum().backward()
        found.append([output, hidden.grad, layer.experts.fc1.grad, layer.router.weight.grad])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected)
    assert all(segment.capturable for segment in layer.segments())


def test_a_dispatcher_is_in_layers():
    run_ranks(layer_case, 2)


def test_a_dispatcher_is_in_plans():
    made, plain = toy_recipe(), recipe(moe=EXPERTS)
    shapes, sizes = shapes_of(made, 2), shapes_of(made, 2).dispatch_sizes
    assert shapes.dispatcher is toy_dispatcher.STATIC and shapes.rows_at_experts == 2 * 32 * 2
    assert problems(made, 2) == []
    row, tokens = 16 * 4, 32
    sent = traffic.layer(shapes).forward["etp-ep"]
    assert sent == 2 * (2 * tokens * row // 2)
    ffn = activations._ffn(shapes, 8, shapes.rows_at_experts)
    front = tokens * 4 * 4 + 2 * tokens * 4  # logits and choices
    kept = front + shapes.rows_at_experts * row + ffn + 1000 * tokens
    assert activations.experts(shapes) == kept and sizes.ranks == 2
    assert not shapes.dispatcher.host_syncs and shapes_of(plain, 2).dispatcher.host_syncs


def test_a_dispatcher_is_in_graph_scopes():
    facts = graph_facts(toy_recipe(), 2)
    assert facts["captured"] == SEGMENTS and facts["eager"] == []
    assert captured_segments(("moe",), all_segments(shapes_of(toy_recipe(), 2))) == set(SEGMENTS[1:])
    said = must_run_eagerly(["dispatch", "experts", "combine"])
    assert said.endswith('(not with moe.dispatcher "symmetric", for ranks of one machine or "static")')


def test_a_dispatcher_is_in_layout_checks(monkeypatch):
    monkeypatch.setattr(toy_dispatcher, "MAX_TOKENS", 31)
    (found,) = problems(toy_recipe(), 2)
    assert str(found) == "dispatcher 'static' takes 31 tokens, got 32; change data.micro_batch_size"


def states_case(rank, world, names, layout):
    """The states of real dispatchers have the tensors that their specs declare."""
    grid = RankGrid(world_size=world, **layout)
    groups = ParallelGroups.create(grid)
    model = plain_moe()
    made = Recipe(
        model=model,
        parallel=ParallelConfig(**layout),
        data=DataConfig(seq_len=8, micro_batch_size=2),
        train=TrainConfig(global_batch_size=2 * world, dtype="float32"),
    )
    for name in names:
        shapes = shapes_of(replace(made, model=plain_moe(dispatcher=name)), world)
        spec, sizes = shapes.dispatcher, shapes.dispatch_sizes
        dispatcher = make_dispatcher(shapes.model.moe, groups)
        assert dispatcher.spec is spec and load(spec.make) is not None
        indices = torch.rand(sizes.tokens, 8).topk(3, 1).indices.to(torch.int32)
        probs = torch.rand(sizes.tokens, 3, requires_grad=True)
        tokens = torch.rand(sizes.tokens, 16, requires_grad=True)
        earlier = {"indices": indices, "probs": probs}
        state = dispatcher.preprocess(indices, probs, sizes.tokens)
        assert_declared(state, spec.prepared(sizes), earlier)
        earlier = {each.name: getattr(state, each.name) for each in fields(state)}
        rows, offsets, state = dispatcher.dispatch(tokens, state)
        if spec.dispatched is not None:
            facts = spec.dispatched(sizes)
            assert_tensor(rows, facts.pop("rows"), None)
            assert_tensor(offsets, facts.pop("offsets"), earlier.get("offsets"))
            assert_declared(state, facts, earlier)
        restored = dispatcher.dispatched.with_tensors(state.tensors())
        assert all(a is b for a, b in zip(restored.tensors(), state.tensors(), strict=True))
        dispatcher.combine(rows, state)


def assert_declared(state, facts, earlier):
    assert [each.name for each in fields(state)] == list(facts)
    for name, fact in facts.items():
        assert_tensor(getattr(state, name), fact, earlier.get(name))


def assert_tensor(tensor, fact, earlier):
    if fact is None:
        assert tensor is earlier
    else:
        assert tuple(tensor.shape) == fact.shape and str(tensor.dtype) == f"torch.{fact.dtype}"
        assert tensor.requires_grad is fact.grad


@pytest.mark.parametrize(
    ("world", "names", "layout"),
    [
        (1, ["alltoall"], {}),
        (2, ["alltoall", "allgather", "symmetric", "static"], {"ep": 2}),
        (2, ["alltoall"], {"tp": 2}),
        (2, ["alltoall"], {"etp": 2}),
    ],
    ids=("local", "ep", "sharing", "sharing sequences"),
)
def test_states_are_as_their_specs_declare(world, names, layout):
    run_ranks(states_case, world, names, layout)
