"""GPT over pipeline stages is the undivided GPT: weights, loss, experts' losses and loads, every gradient."""

from __future__ import annotations

import pytest
import torch
from marks import full

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Placement, gpt_stages
from fastmp.nn.stages import layers_of_stages
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.ranks import run_ranks
from tools.prove.parity import CLOSE, GPT2, LLAMA, MIXTRAL, TIED, differences
from tools.small_models import make_gpt

pytestmark = pytest.mark.usefixtures("one_thread")


def compare(*arguments, **options):
    found = differences(*arguments, **options)
    assert max(found.values()) <= CLOSE, found


def layout_case(rank, world, layout, runs):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    for run in runs:
        compare(groups=groups, **run)


def test_chunks_of_one_rank():
    for config in (GPT2, LLAMA, TIED):
        compare(config, ParallelGroups.alone(), 2, 2)


# `test_layouts` draws all else.
LAYOUTS = [
    (
        2,
        {"pp": 2},
        [
            {"config": GPT2, "vpp": 2, "number": 4, "layers": (1, 0, 3, 0)},
            {"config": TIED, "vpp": 2, "number": 4, "recompute": True, "schedule": "zero_bubble"},
            {"config": TIED, "vpp": 2, "number": 3, "schedule": "dualpipe_v"},
        ],
    ),
    *full([(4, {"pp": 2, "tp": 2}, [{"config": LLAMA, "vpp": 2, "number": 4, "sequence_parallel": True}])]),
    (
        4,
        {"pp": 2, "tp": 2, "ep": 2, "etp": 1},
        [{"config": MIXTRAL, "vpp": 1, "number": 4, "schedule": "zero_bubble", "recompute": True}],
    ),
]


@pytest.mark.parametrize(
    ("world", "layout", "runs"), LAYOUTS, ids=lambda v: str(v) if type(v) is dict else ""
)
def test_stages_equal_the_undivided_model(world, layout, runs):
    run_ranks(layout_case, world, layout, runs, timeout=120)


def test_layers_of_stages():
    assert layers_of_stages(8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert layers_of_stages(5, 3, (1, 4, 0)) == [range(0, 1), range(1, 5), range(5, 5)]
    with pytest.raises(ValueError, match="6 layers are not divisible by 4 stages"):
        layers_of_stages(6, 4)
    for wrong in ((2, 2), (2, 2, 1), (4, -1, 1, 0)):
        with pytest.raises(ValueError, match=r"layers \[.*\] must be 4 numbers .* that sum to 4"):
            layers_of_stages(4, 4, wrong)


def test_a_rank_without_parameters_is_refused():
    """By all ranks, before the first gradient norm would have nothing to count on one of them."""

    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, pp=3))
        with pytest.raises(ValueError, match=r"rank 1 of 3 has no layer among \[2, 0, 1, 1, 0, 0\]"):
            gpt_stages(GPT2, Placement(groups), vpp=2, layers=(2, 0, 1, 1, 0, 0))
        return [len(stage.layers) for stage in gpt_stages(GPT2, Placement(groups), layers=(0, 4, 0))]

    assert run_ranks(rank_main, 3) == [[0], [4], [0]]


def test_marks_of_a_stage_are_those_of_the_model():
    marks = {name: parallel_attributes(p) for name, p in make_gpt(GPT2).named_parameters()}
    (stage,) = gpt_stages(GPT2)
    assert {name: parallel_attributes(p) for name, p in stage.named_parameters()} == marks
    for part in gpt_stages(GPT2, vpp=2):
        assert {name: parallel_attributes(p) for name, p in part.named_parameters()}.items() <= marks.items()


def test_the_two_tied_tables_are_equal_whatever_the_streams_and_one_of_them_is_marked():
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, pp=2))
        torch.manual_seed(rank)
        stages = gpt_stages(GPT2, Placement(groups, init="sharded"), vpp=2)
        for _ in range(2):
            table = stages[-rank].word_embedding.weight
            assert parallel_attributes(table).pipeline_replica == (rank == 1)
            assert not any(
                p.pipeline_replica for stage in stages for p in stage.parameters() if p is not table
            )
            stages = [stage.double() for stage in stages]  # the mark outlives a conversion
        return table.detach()

    first, last = run_ranks(rank_main, 2)
    assert torch.equal(first, last)
