"""GPT computes what the models of `transformers` compute from the same weights: logits and every gradient."""

from __future__ import annotations

import sys

import pytest
import torch
from hf_models import BUNDLED, DATA, bundle_of, from_tensors, load_bundle
from nn_tools import compare_with_reference

from fastmp.nn import GPT, Placement
from fastmp.testing.ranks import run_ranks
from tools.small_models import local_shard

MOE_FAMILIES = ("Mixtral", "Qwen3Moe")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.mark.parametrize(
    "tp, sequence_parallel, dtype",
    (
        (1, False, torch.float64),
        (2, True, torch.float64),
        pytest.param(4, False, torch.float64, marks=pytest.mark.full),
        pytest.param(1, False, torch.float32, marks=pytest.mark.full),
    ),
)
@pytest.mark.parametrize("family", BUNDLED)
def test_the_reference_bundles(family, tp, sequence_parallel, dtype):
    reference, tolerance = load_bundle(family), TOLERANCE[dtype]
    run_ranks(
        lambda rank, world: compare_with_reference(reference, tp, dtype, tolerance, sequence_parallel), tp
    )


@pytest.mark.parametrize(
    "tp, sequence_parallel, experts",
    ((2, True, {"ep": 2, "etp": 1}), pytest.param(4, False, {"ep": 2, "etp": 2}, marks=pytest.mark.full)),
)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_reference_bundles_with_experts_over_ranks(family, tp, sequence_parallel, experts):
    reference, options = load_bundle(family), (torch.float64, 1e-9, sequence_parallel)
    run_ranks(lambda rank, world: compare_with_reference(reference, tp, *options, **experts), tp)


@pytest.mark.parametrize("family", BUNDLED)
def test_a_bundle_is_small_and_says_where_it_is_from(family):
    from safetensors import safe_open

    with safe_open(bundle_of(family), "pt") as file:
        assert set(file.metadata()) == {"sizes", "seed", "transformers"}
    assert bundle_of(family).stat().st_size < 1 << 20


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_bf16_is_as_close_where_the_same_experts_are_chosen(family):
    """Rounding moves some tokens to other experts, here as there: they are counted, the rest is compared."""
    reference = load_bundle(family)
    tokens_BS = reference["tokens"]
    model = GPT(reference["config"], Placement(dtype=torch.bfloat16))
    chosen = []
    for layer in model.layers:
        layer.moe.router.register_forward_hook(lambda module, args, output: chosen.append(output[0]))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(local_shard(reference["weights"][name], param, None))
        ours = model(tokens_BS)[..., : model.config.vocab_size].transpose(0, 1).double()
    S, B = tokens_BS.t().shape
    experts = torch.stack([e.view(S, B, -1).transpose(0, 1).sort(-1).values for e in chosen])
    moved, moved_there = (
        (x != reference["experts"]).any(-1).any(0) for x in (experts, reference["bf16_experts"])
    )
    assert moved.sum() <= 4, f"{moved.sum()} of {moved.numel()} tokens moved, {moved_there.sum()} there"
    same = ~(moved | moved_there)
    error, error_there = (
        (x - reference["logits"])[same].square().mean().sqrt() for x in (ours, reference["bf16_logits"])
    )
    assert error <= 1.1 * error_there, (error, error_there)


@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
@pytest.mark.parametrize("family", BUNDLED)
def test_a_live_model(family, tp):
    """Other weights than the bundle's, from the `transformers` that is installed."""
    pytest.importorskip("transformers", reason="transformers is not installed: the bundle stands for it")
    sys.path.insert(0, str(DATA))
    import make_transformers_reference as maker

    reference = from_tensors(family, maker.FAMILIES[family], maker.reference(family, seed=99))
    run_ranks(lambda rank, world: compare_with_reference(reference, tp, torch.float64, 1e-9), tp)
