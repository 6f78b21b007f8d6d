"""GPT computes what `transformers` GPT-2 computes from the same weights: logits and every gradient."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gpt2_reference import BUNDLE, gpt_config, load_bundle, to_fastmp
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


@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
def test_a_live_gpt2(tp):
    """Other weights than the bundle's, from the `transformers` that is installed."""
    pytest.importorskip("transformers", reason="transformers is not installed: the bundle stands for it")
    sys.path.insert(0, str(Path(BUNDLE).parent))
    import make_gpt2_reference as maker

    model = maker.random_gpt2(seed=99)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    text_BS = torch.randint(maker.SIZES["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(1))
    tokens_BS, targets_BS = text_BS[:, :-1], text_BS[:, 1:]
    logits_BSV, loss_BS, grads = maker.run(model.double(), tokens_BS, targets_BS)
    heads = maker.SIZES["n_head"]
    reference = {
        "config": gpt_config(maker.SIZES),
        "weights": to_fastmp(weights, heads),
        "grads": to_fastmp(grads, heads),
        "tokens": tokens_BS,
        "targets": targets_BS,
        "logits": logits_BSV,
        "loss": loss_BS,
    }
    run_ranks(lambda rank, world: compare_with_reference(reference, tp, torch.float64, 1e-10), tp)
