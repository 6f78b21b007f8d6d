"""A GPT trained by Muon: on every layout what one rank computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from marks import full
from train_tools import DENSE, EXPERTS
from trainer_tools import BUCKETS, case, check_resume, make_groups, make_trainer, run

from fastmp.config import ParallelConfig
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.format import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

MUON = replace(BUCKETS, name="muon")
UNDER_MUON = {
    2: [
        case(EXPERTS, ep=2),
        case(tp=2, sequence_parallel=True),
        # the second rank has no layers, and nothing for Muon
        case(EXPERTS, pp=2, vpp=2, stage_layers=(1, 0, 3, 0), microbatch_group_size=4),
    ],
    4: [case(EXPERTS, pp=2, vpp=2, ep=2), case(EXPERTS, tp=2, ep=2), case(EXPERTS, tp=4, etp=2), case()],
}


@pytest.mark.parametrize("world", [2, *full([4])])
def test_muon_on_every_layout_is_that_of_one_rank(world):
    """Gradients differ in rounding; what Muon makes of them, in little more."""

    def rank_main(rank, world_size):
        runs = []
        for config, layout in UNDER_MUON[world]:
            groups = make_groups(world_size, layout)
            runs.append(run(make_trainer(groups, layout, config=config, optimizer=MUON)))
        return runs

    alone = {config: run(make_trainer(config=config, optimizer=MUON)) for config in (DENSE, EXPERTS)}
    for runs in run_ranks(rank_main, world, timeout=180):
        for (config, layout), (curve, _, _, params, _, _) in zip(UNDER_MUON[world], runs, strict=True):
            expected, _, _, whole_params, _, _ = alone[config]
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=0, atol=1e-8)
            for name, param in params.items():
                message = f"{layout}: {name}"
                torch.testing.assert_close(param, whole_params[name], rtol=0, atol=1e-8, msg=message)


@pytest.mark.full
def test_resume_is_bitwise_and_of_muon_alone(tmp_path):
    """Each rank saves the matrices it owns."""

    def rank_main(rank, world_size):
        layout = ParallelConfig(ep=2)
        groups, options = make_groups(world_size, layout), {"dtype": torch.float32, "run_dir": str(tmp_path)}
        make = partial(make_trainer, groups, layout, **options)
        tensors = check_resume(partial(make, optimizer=MUON), steps=4)
        with pytest.raises(CheckpointError, match=r"optimizer/.*weight/(momentum|exp_avg) is .*here"):
            make(optimizer=BUCKETS).resume()
        return {name for name in tensors if name.endswith("attention.proj.weight/momentum")}

    left, right = run_ranks(rank_main, 2)
    assert left and right and not left & right
