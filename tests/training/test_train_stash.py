"""Training with an activation stash is that of an all-to-all, bit for bit, whatever the loads of ranks are.

The biases of the experts force the loads of a step; the ring is full of NaN before each. It holds what the
stated load needs, so that some steps overflow it, and are run again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graphed_trainers import CONFIG, make_graphed
from marks import exhaustive, full
from trainer_tools import make_groups

from fastmp.config import GraphConfig, ParallelConfig
from fastmp.cuda_graphs import GraphError, replay_verifier
from fastmp.nn.moe.layer import MoELayer
from fastmp.ops.stash import HEAD, TAIL
from fastmp.testing.ranks import run_ranks

LAYERS = GraphConfig(enabled=True, warmup=1)
FULL, STEP = (replace(LAYERS, scope=(scope,)) for scope in ("full", "full_step"))
VERIFIED = replace(LAYERS, verify_every=2)
EXPERTS = CONFIG.moe.num_experts
Loads = Callable[[int], list[float]]  # of a step, added to the scores by which experts are chosen


def at_random(seed: int) -> Loads:
    def loads(step: int) -> list[float]:
        draw = random.Random(1000 * seed + step)
        strength = draw.choice((0.0, 0.1, 1.0))
        return [draw.uniform(-strength, strength) for _ in range(EXPERTS)]

    return loads


def to_one_rank(step: int) -> list[float]:
    return [float(expert < EXPERTS // 2) * 9 for expert in range(EXPERTS)]


def alternating(step: int) -> list[float]:
    return [float((expert < EXPERTS // 2) == step % 2) * 9 for expert in range(EXPERTS)]


def growing(step: int) -> list[float]:
    return [float(expert < EXPERTS // 2) * 0.1 * step for expert in range(EXPERTS)]


def run(groups, layout, graphs, loads, steps, overlap=False, **moe):
    """All numbers of some steps; how often a step was run again; and the trainer."""
    config = replace(CONFIG, moe=replace(CONFIG.moe, **moe))
    options = {"overlap_experts": overlap, "config": config, "steps": steps}
    trainer = make_graphed(graphs, groups, layout, **options)
    layers = [module for module in trainer.model.modules() if isinstance(module, MoELayer)]
    seen, again = [], 0
    for step in range(steps):
        for layer in layers:
            layer.router.expert_bias.copy_(torch.tensor(loads(step)))
        for ring in {id(layer.stash): layer.stash for layer in layers if layer.stash}.values():
            for tensor in ring.rings:
                tensor.fill_(torch.nan)
        result = trainer.train_step()
        seen += [result.loss, result.aux_loss, result.grad_norm, result.expert_counts]
        again += "was rerun" in trainer._steps.rerun.note
    seen += [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return seen, again, trainer, layers


def loads_case(rank, world, layout, graphs, overlap, sequences, steps):
    groups, reruns = make_groups(world, layout), []
    for loads in sequences:
        loads = at_random(loads) if isinstance(loads, int) else loads
        ordinary, never, *_ = run(groups, layout, None, loads, steps)
        found, again, trainer, layers = run(
            groups, layout, graphs, loads, steps, overlap, dispatcher="symmetric"
        )
        assert never == 0 and len(found) == len(ordinary) and all(map(torch.equal, found, ordinary)), loads
        stash = layers[0].stash
        if layout.recompute:
            assert stash is None
            continue
        assert stash.state[HEAD] == stash.state[TAIL]
        if graphs is not None and not again:
            assert trainer.graphs.num_graphs > 0
        reruns.append(again)
    return reruns


RANDOM, ADVERSARIAL = (0,), (to_one_rank, alternating, growing)
CASES = {
    "eager": (2, ParallelConfig(ep=2), None, False),
    "layers": (2, ParallelConfig(ep=2), LAYERS, False),
    "full": (2, ParallelConfig(ep=2), FULL, False),
    "full_step": (2, ParallelConfig(ep=2), STEP, False),
    "verified": (2, ParallelConfig(ep=2), VERIFIED, False),
    "overlap": (2, ParallelConfig(ep=2), None, True),
    "overlap, layers": (2, ParallelConfig(ep=2), LAYERS, True),
    "etp": (4, ParallelConfig(ep=2, etp=2), LAYERS, False),
    "tp, sp": (4, ParallelConfig(tp=2, ep=4, etp=1, sequence_parallel=True), LAYERS, False),
    "cp": (4, ParallelConfig(cp=2, ep=4), LAYERS, False),
    "vpp": (4, ParallelConfig(pp=2, vpp=2, ep=2), LAYERS, False),
    "zero bubble": (4, ParallelConfig(pp=2, ep=2, schedule="zero_bubble"), LAYERS, False),
    "zero bubble, step": (4, ParallelConfig(pp=2, ep=2, schedule="zero_bubble"), STEP, False),
    "on a v": (4, ParallelConfig(pp=2, vpp=2, ep=2, schedule="dualpipe_v"), LAYERS, False),
    "on a v, overlap": (4, ParallelConfig(pp=2, vpp=2, ep=2, schedule="dualpipe_v"), LAYERS, True),
    "recompute": (2, ParallelConfig(ep=2, recompute=True), LAYERS, False),
}
QUICK = ("full_step", "zero bubble")
FULL_SET = ("verified", "overlap, layers", "on a v, overlap")
OTHERS = [name for name in CASES if name not in QUICK + FULL_SET]


@pytest.mark.parametrize("name", [*QUICK, *full(FULL_SET), *exhaustive(OTHERS)])
def test_any_load_trains_as_an_all_to_all(name):
    world, *how = CASES[name]
    sequences = (*RANDOM, *ADVERSARIAL) if name not in QUICK else (0, alternating)
    reruns = run_ranks(loads_case, world, *how, sequences, 6, timeout=290)
    assert all(each == reruns[0] for each in reruns)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["layers", "full_step", "zero bubble", "vpp"])
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_two_hundred_sequences(name, first):
    world, *how = CASES[name]
    run_ranks(loads_case, world, *how, range(first, first + 25), 5, timeout=3000)


def differing_case(rank, world):
    def differs(slot, what, graph, eager):
        raise GraphError(f"{what} differs")

    replay_verifier._compare = differs
    with pytest.raises(GraphError, match="output 0 differs"):
        run(make_groups(world, ep=2), ParallelConfig(ep=2), VERIFIED, at_random(0), 6, dispatcher="symmetric")


@pytest.mark.full
def test_a_difference_in_a_step_that_is_not_void_is_an_error():
    run_ranks(differing_case, 2)
