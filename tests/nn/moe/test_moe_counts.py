"""The counts of balance losses: how they travel between ranks, and which ranks add them up."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from moe_tools import hidden_states, make_moe, plain_moe, with_moe

from fastmp.distributed import deferred as late
from fastmp.distributed.collectives import group_rank, reduce_from_group
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers.alltoall import all_to_all
from fastmp.nn.moe.router import Router
from fastmp.nn.recompute import recompute
from fastmp.testing.ranks import run_ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def late_case(rank, world):
    """The collectives of a layer in order, with the ends of those in the background, and what it computes."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=2))
    layer, log, seen = make_moe(with_moe(), groups), [], []

    class Logged:
        def __init__(self, work):
            self.work = work

        def wait(self):
            log.append("counts waited for")
            self.work.wait()

    def all_reduce(x, op=dist.ReduceOp.SUM, group=None, async_op=False):
        log.append("counts")
        work = whole(x, op, group=group, async_op=async_op)
        return Logged(work) if async_op else work

    def forward_and_backward(run):
        layer.zero_grad()
        hidden = hidden_states(4, 4)[:, 2 * rank : 2 * rank + 2].requires_grad_()
        output, aux, _ = run(hidden)
        log.append("layer ends")
        assert not late._PENDING
        (output.square().sum() + aux).backward()
        assert not late._PENDING  # a recomputation leaves nothing
        return [output, aux, hidden.grad, *(param.grad for param in layer.parameters())]

    def at_once(hidden):
        with patch.object(
            layer.router, "forward", lambda x, late, **chosen: Router.forward(layer.router, x, **chosen)
        ):
            return layer(hidden)

    def sends(*rows, **options):
        log.append("rows")
        return all_to_all(*rows, **options)

    whole = dist.all_reduce
    with patch.object(dist, "all_reduce", all_reduce):
        for run in (layer, lambda hidden: recompute(layer, hidden, rng=None), at_once):
            with patch("fastmp.nn.moe.dispatchers.alltoall.all_to_all", sends):
                seen.append((forward_and_backward(run), list(log)))
            log.clear()

        def fails(*rows, **options):
            raise RuntimeError("no rows today")

        with (
            patch("fastmp.nn.moe.dispatchers.alltoall.all_to_all", fails),
            pytest.raises(RuntimeError, match="no rows"),
        ):
            layer(hidden_states(4, 4)[:, 2 * rank : 2 * rank + 2])
        assert not late._PENDING
    return seen


def test_counts_of_ranks_travel_while_rows_do_and_once():
    """A recomputation takes those of its forward; the values are those of a collective that blocks."""
    start = ["counts", "rows", "rows", "counts waited for", "layer ends"]
    for ends_late, recomputed, at_once in run_ranks(late_case, 2):
        assert ends_late[1] == start
        assert recomputed[1][: len(start)] == start and "counts" not in recomputed[1][len(start) :]
        assert recomputed[1].count("rows") > 2
        assert at_once[1] == ["counts", "rows", "rows", "layer ends"]
        assert ends_late[0][1] > 0.0
        for each in (ends_late, recomputed):
            assert all(torch.equal(a, b) for a, b in zip(each[0], at_once[0], strict=True))


def replica_case(rank, world, layout):
    """The loss and gradients of this replica's own batch, on one rank and on those of tp and cp."""
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    config = plain_moe(aux_loss=0.3, z_loss=0.1, aux_loss_group="tp_cp")
    one, many = make_moe(config), make_moe(config, groups)
    full = hidden_states(8, 2 * groups.grid.dp)
    dp_rank = group_rank(groups.dp)
    alone, own = (full[:, 2 * dp_rank : 2 * dp_rank + 2].clone() for _ in range(2))
    own = own.chunk(groups.grid.cp)[group_rank(groups.cp)].clone()
    results = []
    for layer, hidden in ((one, alone.requires_grad_()), (many, own.requires_grad_())):
        output, aux, _ = layer(hidden)
        if layer is many:
            aux = reduce_from_group(aux, groups.tp)
        (output.square().sum() + aux).backward()
        results.append((aux.detach().clone(), hidden.grad))
    (aux, grad), (own_aux, own_grad) = results
    if groups.cp is not None:
        dist.all_reduce(own_aux, group=groups.cp)
        grad = grad.chunk(groups.grid.cp)[group_rank(groups.cp)]
    torch.testing.assert_close(own_aux, aux, **CLOSE)
    torch.testing.assert_close(own_grad, grad, **CLOSE)
    return float(own_aux)


@pytest.mark.parametrize(
    ("world", "layout"), ((2, {"ep": 2}), (4, {"tp": 2, "ep": 2, "etp": 1}), (4, {"cp": 2}))
)
def test_a_loss_that_counts_the_tokens_of_each_replica(world, layout):
    losses = run_ranks(replica_case, world, layout)
    assert len(set(losses)) == 2  # of two replicas, whose batches differ
