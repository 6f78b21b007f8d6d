"""Check that the ranks of every parallel layout start their communication in an order that cannot deadlock.

Each rank logs the collectives and messages it starts in eager, captured and replayed training steps and in
one evaluation; `order_tools.problems` compares the logs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from marks import ON_GPUS, full
from order_tools import OrderLog, Started, problems
from train_tools import Samples
from trainer_tools import make_groups, make_trainer

import fastmp
from fastmp.config import GPTConfig, GraphConfig, MoEConfig, OptimizerConfig, ParallelConfig
from fastmp.testing.ranks import run_ranks

BUCKETS = OptimizerConfig(bucket_size=300)
EXPERTS = MoEConfig(num_experts=4, expert_ffn_hidden_size=8, expert_bias=True, aux_loss=0.02)
ON, STEP = GraphConfig(enabled=True), GraphConfig(enabled=True, scope=("full_step",))
FULL, VERIFIED = GraphConfig(enabled=True, scope=("full",)), GraphConfig(enabled=True, verify_every=2)
EVALUATION = GraphConfig(enabled=True, evaluation=True)
ZB = {"schedule": "zero_bubble"}


def case(layers=4, graphs=None, world=4, optimizer=None, moe=None, **layout):
    """Return the arguments of `started_by`; `moe` overrides fields of EXPERTS, None makes the model dense."""
    experts = None if moe is None else replace(EXPERTS, **moe)
    return world, layers, experts, layout, {"optimizer": optimizer or BUCKETS, "graphs": graphs}


MUON = replace(BUCKETS, name="muon")
WHOLE = replace(BUCKETS, shard=False)
SP = {"sequence_parallel": True}
SYMMETRIC = {"dispatcher": "symmetric"}
RERUN = {**SYMMETRIC, "symmetric_capacity": 0.6, "symmetric_overflow": "rerun"}
OVERLAP = {"overlap_experts": True}
APART = {"ep": 2, "tp": 2, "etp": 1, **SP}

V = {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"}
STASH = {**SYMMETRIC, "activation_stash": 1.0}
AUX = {"aux_loss_group": "tp_cp", "sequence_aux_loss": 0.01}

QUICK = {"tp2 sp graphs": case(2, ON, tp=2, **SP)}
FULL_SET = {
    "pp2 ep2 overlap vpp2 graphs": case(4, ON, moe={}, pp=2, ep=2, vpp=2, **OVERLAP),
    "dualpipe_v": case(8, **V),
    "dualpipe_v graphs": case(8, ON, **V),
    "dualpipe_v ep2 overlap": case(8, moe={}, ep=2, **V, **OVERLAP),
    "ep2 stash graphs": case(2, ON, moe=STASH, ep=2),
    "tp2 ep2 aux_loss_group graphs": case(2, ON, moe=AUX, ep=2, tp=2, **SP),
    "pp2 ep2 stash step": case(4, STEP, moe=STASH, pp=2, ep=2),
}
OTHERS = {
    "dualpipe_v ep2 overlap graphs": case(8, ON, moe={}, ep=2, **V, **OVERLAP),
    "dualpipe_v ep2 symmetric overlap step": case(8, STEP, moe=SYMMETRIC, ep=2, **V, **OVERLAP),
    "tp2 sp": case(tp=2, **SP),
    "dp4 muon": case(2, optimizer=MUON),
    "tp2 muon": case(2, optimizer=MUON, tp=2),
    "tp2 sp whole": case(optimizer=WHOLE, tp=2, **SP),
    "ep2": case(2, moe={}, ep=2),
    "ep2 graphs": case(2, ON, moe={}, ep=2),
    "ep2 shared expert graphs": case(2, ON, moe={"shared_expert_ffn_hidden_size": 8}, ep=2),
    "ep2 overlap": case(2, moe={}, ep=2, **OVERLAP),
    "ep2 overlap graphs": case(2, ON, moe={}, ep=2, **OVERLAP),
    "tp2 ep2": case(2, moe={}, tp=2, ep=2, **SP),
    "tp2 ep2 etp1 graphs": case(2, ON, moe={}, **APART),
    "tp2 ep1": case(2, moe={}, tp=2),
    "ep2 allgather": case(2, ON, moe={"dispatcher": "allgather"}, ep=2),
    "ep2 symmetric": case(2, moe=SYMMETRIC, ep=2),
    "ep4 symmetric graphs": case(2, ON, moe=SYMMETRIC, ep=4),
    "ep2 symmetric overlap graphs": case(2, ON, moe=SYMMETRIC, ep=2, **OVERLAP),
    "ep2 symmetric step": case(2, STEP, moe=SYMMETRIC, ep=2),
    "cp2": case(2, cp=2),
    "cp2 ep2 graphs": case(2, ON, moe={}, cp=2, ep=2),
    "pp2": case(pp=2),
    "pp2 vpp2": case(pp=2, vpp=2),
    "pp2 zb": case(pp=2, **ZB),
    "pp2 vpp2 zb graphs": case(4, ON, pp=2, vpp=2, **ZB),
    "pp4": case(pp=4),
    "pp4 vpp2": case(8, pp=4, vpp=2),
    "pp4 zb": case(pp=4, **ZB),
    "pp2 graphs": case(4, ON, pp=2),
    "pp2 step": case(4, STEP, pp=2),
    "pp2 ep2": case(moe={}, pp=2, ep=2),
    "pp2 ep2 overlap": case(moe={}, pp=2, ep=2, **OVERLAP),
    "pp2 ep2 symmetric overlap vpp2 graphs": case(4, ON, moe=SYMMETRIC, pp=2, ep=2, vpp=2, **OVERLAP),
    "w8 tp2 pp2 sp": case(world=8, tp=2, pp=2, **SP),
    "w8 tp2 pp2 ep2 etp1 graphs": case(4, ON, 8, moe={}, pp=2, **APART),
    "w8 tp2 pp2 ep4 etp1 zb": case(world=8, moe={}, pp=2, **{**APART, "ep": 4, **ZB}),
    "w8 tp2 cp2 ep4 etp1": case(2, world=8, moe={}, cp=2, **{**APART, "ep": 4}),
    "w8 pp2 ep4 overlap vpp2": case(world=8, moe={}, pp=2, ep=4, vpp=2, **OVERLAP),
    "w8 pp4 tp2 vpp2": case(8, world=8, pp=4, tp=2, vpp=2, **SP),
    "w8 pp4 ep2 zb vpp2": case(8, world=8, moe={}, pp=4, ep=2, vpp=2, **ZB),
    "verified tp2 sp": case(2, VERIFIED, tp=2, **SP),
    "verified pp2 ep2": case(4, VERIFIED, moe={}, pp=2, ep=2),
    "verified ep2 overlap": case(2, VERIFIED, moe={}, ep=2, **OVERLAP),
    "rerun ep2": case(2, ON, moe=RERUN, ep=2),
    "rerun pp2 ep2": case(4, moe=RERUN, pp=2, ep=2),
    "tp2 evaluation in graphs": case(2, EVALUATION, tp=2),
    "pp2 full graphs": case(4, FULL, pp=2),
    "w8 recompute zb": case(world=8, moe={}, pp=2, recompute=True, **{**APART, **ZB}),
    "ep2 recompute graphs": case(2, ON, moe={}, ep=2, recompute=True),
    "w8 tp2 pp2 muon": case(world=8, optimizer=MUON, tp=2, pp=2, **SP),
    "w8 tp2 pp2 cp2 graphs": case(4, ON, 8, tp=2, pp=2, cp=2, **SP),
    "w8 tp2 pp2 ep2 overlap graphs": case(4, ON, 8, moe={}, tp=2, pp=2, ep=2, **{**SP, **OVERLAP}),
    "pp2 ep2 shared expert overlap": case(
        4, ON, moe={"shared_expert_ffn_hidden_size": 8}, pp=2, ep=2, **OVERLAP
    ),
}


def started_by(rank, world, layers, experts, layout, options):
    config = GPTConfig(
        num_layers=layers, hidden_size=16, num_heads=4, vocab_size=128, max_seq_len=16, moe=experts
    )
    layout = ParallelConfig(**layout)
    groups = make_groups(world, layout)
    exchange = () if groups.etp_ep is None else dist.get_process_group_ranks(groups.etp_ep)
    options = {name: option for name, option in options.items() if option is not None}
    device = str(fastmp.init().device)
    with OrderLog(exchange) as log:
        trainer = make_trainer(
            groups,
            layout,
            config=config,
            seed=3,
            device=device,
            dtype=torch.float32,
            data=Samples(2),
            overlap_experts=layout.overlap_experts,
            global_batch_size=32 if layout.pp > 1 else 16,  # two microbatches or more on a rank
            **options,
        )
        for step in range(6):
            trainer.train_step()
            if step == 4:
                trainer.evaluate()
        graphs = trainer.graphs.num_graphs if trainer.graphs is not None else 0
        trainer.close()
    return log.started, graphs


@pytest.mark.parametrize("device", ["cpu", ON_GPUS])
@pytest.mark.parametrize(
    "name",
    [*QUICK, *full(FULL_SET), *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)],
)
def test_the_order_of_communication_cannot_hang(name, device):
    """On GPUs the collectives of a replayed graph are not logged: there the ranks must come to an end."""
    world, layers, experts, layout, options = {**QUICK, **FULL_SET, **OTHERS}[name]
    ran = run_ranks(started_by, world, layers, experts, layout, options, timeout=280, device=device)
    logs, graphs = zip(*ran)
    assert not problems(logs)
    assert all(len(log) > 20 for log in logs)
    assert all(graphs) == (options["graphs"] is not None)


def collective(group, ranks=(0, 1), op="allreduce_"):
    return Started(op, group, ranks, (((1,), torch.float32),))


def message(op, peer):
    return Started(op, "pp", (0, 1), (((1,), torch.float32),), peer)


def test_crossed_groups_are_found():
    a, b = collective("a"), collective("b")
    (found,) = problems([[a, b], [b, a]])
    assert found.startswith("deadlock: rank 0 in Started(op='allreduce_', group='a'") and "rank 1 in" in found
    assert not problems([[a, b], [a, b]])


def test_two_ranks_that_both_send_first_are_found():
    """A stream per direction would let these messages pass; a single queue deadlocks."""
    send, receive = ([message(op, peer) for peer in (1, 0)] for op in ("send", "recv_"))
    differs, hangs = problems([[send[0], receive[0]], [send[1], receive[1]]])
    assert differs.startswith("group pp of ranks (0, 1): call 0 of 2 is") and hangs.startswith("deadlock: ")
    assert not problems([[send[0], receive[0]], [receive[1], send[1]]])


def test_a_ring_of_groups_is_found():
    """Every communicator has its calls in the same order on both ranks, so only the simulation finds it."""
    ring = [(0, 1), (1, 2), (0, 2)]
    a, b, c = (collective(str(ranks), ranks) for ranks in ring)
    (found,) = problems([[a, c], [b, a], [c, b]])
    assert found.startswith("deadlock: rank 0 in")
    assert not problems([[a, c], [a, b], [b, c]])


def test_different_calls_of_one_group_are_found():
    other = collective("a", op="broadcast_")
    assert problems([[collective("a")], [other]])[0].startswith("group a of ranks (0, 1): call 0 of 1 is")
    assert problems([[collective("a")], []])[0].startswith("group a of ranks (0, 1): call 0 of 1 is")
