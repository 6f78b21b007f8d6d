"""Multi-token prediction in training: losses of any microbatches, checkpoints."""

from __future__ import annotations

import pytest
import torch
from feature_table import DENSE_MTP, MTP
from train_tools import PackedSamples
from trainer_tools import (
    MICRO_BATCH,
    check_resume,
    make_trainer,
    run,
)

from fastmp.config import CheckpointConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"global_batch_size": 2 * MICRO_BATCH}


def test_microbatches_do_not_change_the_loss():
    """Also where sequences predict different numbers of tokens."""
    curves = [
        run(make_trainer(config=DENSE_MTP, samples=PackedSamples, micro_batch=size, **SIZES), 1)[:3]
        for size in (MICRO_BATCH, 2)
    ]
    (want, _, grads), (found, _, others) = curves
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=0, atol=1e-10)
    for key, value in others.items():
        torch.testing.assert_close(value, grads[key], rtol=0, atol=1e-10, msg=key)


def test_checkpoints_have_the_modules(tmp_path):
    options = SIZES | {"checkpoint": CheckpointConfig(), "run_dir": str(tmp_path)}
    saved = check_resume(lambda seed=11: make_trainer(config=MTP, seed=seed, **options))
    assert any("mtp.0.layers.3.moe.experts.fc1" in name for name in saved)
