"""GPT computes what Llama and Qwen3 of `transformers` compute: logits and every gradient, equal weights."""

from __future__ import annotations

import sys

import pytest
import torch
from nn_tools import compare_with_reference
from transformers_reference import DATA, FAMILIES, bundle_of, from_tensors, load_bundle

from fastmp.testing import run_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.mark.parametrize(
    "tp, sequence_parallel, dtype",
    (
        (1, False, torch.float64),
        (2, True, torch.float64),
        (4, False, torch.float64),
        (1, False, torch.float32),
    ),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_bundles(family, tp, sequence_parallel, dtype):
    reference, tolerance = load_bundle(family), TOLERANCE[dtype]
    run_ranks(
        lambda rank, world: compare_with_reference(reference, tp, dtype, tolerance, sequence_parallel), tp
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bundle_is_small_and_says_where_it_is_from(family):
    from safetensors import safe_open

    with safe_open(bundle_of(family), "pt") as file:
        assert set(file.metadata()) == {"sizes", "seed", "transformers"}
    assert bundle_of(family).stat().st_size < 1 << 20


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_model(family, tp):
    """Other weights than the bundle's, from the `transformers` that is installed."""
    pytest.importorskip("transformers", reason="transformers is not installed: the bundle stands for it")
    sys.path.insert(0, str(DATA))
    import make_transformers_reference as maker

    reference = from_tensors(family, maker.FAMILIES[family], maker.reference(family, seed=99))
    run_ranks(lambda rank, world: compare_with_reference(reference, tp, torch.float64, 1e-9), tp)
