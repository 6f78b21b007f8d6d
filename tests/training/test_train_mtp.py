"""Multi-token prediction in training: the losses of any microbatches."""

from __future__ import annotations

import pytest
import torch
from feature_table import DENSE_MTP
from train_tools import PackedSamples
from trainer_tools import (
    MICRO_BATCH,
    make_trainer,
    run,
)

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
