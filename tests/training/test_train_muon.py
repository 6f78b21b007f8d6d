"""A GPT trained by Muon resumes bitwise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from feature_table import MUON
from trainer_tools import BUCKETS, check_resume, make_groups, make_trainer

from fastmp.config import ParallelConfig
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.format import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


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
