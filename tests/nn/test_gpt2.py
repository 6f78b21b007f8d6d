"""GPT computes what `transformers` GPT-2 computes from the same weights: logits and every gradient."""

from __future__ import annotations

import pytest
import torch
from gpt2_reference import BUNDLE, load_bundle
from nn_tools import compare_with_reference

from fastmp.testing.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


CASES = [(tp, sp, dtype) for tp, sp in ((1, False), (2, False), (2, True), (4, False)) for dtype in TOLERANCE]
QUICK = [(1, False, torch.float64), (1, False, torch.float32), (2, True, torch.float64)]


@pytest.mark.parametrize(
    "tp, sequence_parallel, dtype",
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_the_reference_bundle(tp, sequence_parallel, dtype):
    reference = load_bundle()
    tolerance = TOLERANCE[dtype]
    run_ranks(
        lambda rank, world: compare_with_reference(reference, tp, dtype, tolerance, sequence_parallel), tp
    )


def test_the_bundle_is_small_and_says_where_it_is_from():
    from safetensors import safe_open

    with safe_open(BUNDLE, "pt") as file:
        assert set(file.metadata()) == {"sizes", "seed", "transformers"}
    assert BUNDLE.stat().st_size < 4 << 20
