"""Experts divided over ranks are the experts of one rank: outputs, losses, counts and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from moe_tools import (
    hidden_states,
    make_moe,
    own_part,
    own_weight,
    reduce_gradients,
    with_moe,
)

from fastmp.parallel.collectives import reduce_from_group
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.testing import run_ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
# World size, layout; etp is tp unless given.
LAYOUTS = [
    (2, {"ep": 2}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "ep": 2, "etp": 1}),
    (2, {"etp": 2}),
    (2, {"cp": 2}),
    (4, {"ep": 2}),
    (4, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 2, "etp": 1}),
    (4, {"tp": 4, "ep": 2, "etp": 2, "order": "ep-dp-cp-tp-pp"}),
    (8, {"cp": 8, "ep": 8}),
    (8, {"tp": 2, "cp": 2, "ep": 4, "etp": 1}),
    (8, {"tp": 2, "ep": 2, "etp": 2}),
    (8, {"ep": 2, "etp": 4}),
    (8, {"tp": 2, "pp": 2, "ep": 4, "etp": 1}),
]


def layout_id(value) -> str:
    return "-".join(f"{key}{size}" for key, size in value.items()) if isinstance(value, dict) else str(value)


def run(layer, hidden, weight, tp_group):
    """Outputs, then the gradients of input and parameters in place."""
    output, aux, counts = layer(hidden)
    ((output * weight).sum() + reduce_from_group(aux, tp_group)).backward()
    return output.detach(), aux.detach(), counts


def compare(rank, config, groups, S, B, sequence_parallel, variant):
    full, weight = hidden_states(S, B), hidden_states(S, B, seed=6)
    one, many = make_moe(config), make_moe(config, groups, sequence_parallel=sequence_parallel)
    whole = full.clone().requires_grad_()
    output, aux, counts = run(one, whole, weight, None)
    mine = own_part(full, groups, sequence_parallel).clone().requires_grad_()
    result = run(many, mine, own_part(weight, groups, sequence_parallel), groups.tp)
    for total in result[1:]:
        if groups.tp_cp_dp is not None:
            dist.all_reduce(total, group=groups.tp_cp_dp)
    reduce_gradients(many, groups)

    def same(name, actual, expected):
        torch.testing.assert_close(actual, expected, msg=lambda text: f"{variant} {name}: {text}", **CLOSE)

    same("output", result[0], own_part(output, groups, sequence_parallel))
    same("aux", result[1], aux)
    same("counts", result[2], counts)
    same("gradient of the input", mine.grad, own_part(whole.grad, groups, sequence_parallel))
    for (name, param), undivided in zip(many.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(param, own_weight(undivided, param, groups)), name
        same(f"gradient of {name}", param.grad, own_weight(undivided.grad, param, groups))


def layouts_case(rank, world, layout):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    parts = groups.grid.cp * groups.grid.tp
    for dispatcher in ("alltoall", "allgather"):
        for sequence_parallel in (False, True) if groups.tp is not None else (False,):
            S = 2 * parts if sequence_parallel else 3 * groups.grid.cp  # 3 positions: TP does not divide them
            variant = f"{dispatcher}, sequence_parallel={sequence_parallel}"
            config = with_moe(dispatcher=dispatcher)
            compare(rank, config, groups, S, 2 * groups.grid.dp, sequence_parallel, variant)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=layout_id)
def test_layouts_equal_one_rank(world, layout):
    run_ranks(layouts_case, world, layout)
