"""`fastmp.accelerate(model, precision="fp8")`: the modules that multiply in FP8, and what they compute."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_models import batch_of, model_of, step
from marks import full

import fastmp
from fastmp.config.precision import Fp8Recipe
from fastmp.ops import linear_fp8, quantize_rows, quantize_weight

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)

FP8 = Fp8Recipe(32)
SIZES = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 128, "head_dim": 16},
}


@pytest.mark.parametrize("family", ["qwen3_moe", *full(["llama"])])
def test_linears_and_experts_multiply_in_fp8(family):
    model, batch = model_of(family, **SIZES[family]), batch_of(family, 4, 32)
    exact = copy.deepcopy(model)
    fastmp.accelerate(exact)
    table = fastmp.accelerate(model, precision=FP8)
    in_fp8 = {name for name, by in table.replaced.items() if by.startswith("FP8")}
    assert any(name.endswith("Attention.q_proj") for name in in_fp8) and not any("head" in n for n in in_fp8)
    assert (family == "qwen3_moe") == any("its GEMMs" in name for name in in_fp8)
    (found, *_), (want, *_) = (step(each.train(), **batch) for each in (model, exact))
    assert 0 < abs(found.loss - want.loss) < 0.02
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        difference = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert difference < 0.3, name
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 64)
    w, _, w_scale = quantize_weight(layer.weight.detach(), block=32)
    y = linear_fp8(*quantize_rows(x, block=32), w, w_scale, out_dtype=torch.float32)
    assert torch.equal(layer(x), y if layer.bias is None else y + layer.bias)


def test_experts_whose_activation_has_hooks_multiply_in_their_own_dtype():
    """The FP8 epilogue computes the activation itself."""
    model = model_of("qwen3_moe", **SIZES["qwen3_moe"])
    exact = copy.deepcopy(model)
    fastmp.accelerate(exact)
    fastmp.accelerate(model, precision=FP8)
    both = [each.model.layers[1].mlp.experts for each in (model, exact)]
    given = torch.randn(8, 64), torch.randint(4, (8, 2)), torch.rand(8, 2)
    in_fp8, want = (experts(*given) for experts in both)
    assert not torch.equal(in_fp8, want)
    handles = [experts.act_fn.register_forward_hook(lambda m, args, out: out / 2) for experts in both]
    found, halved = (experts(*given) for experts in both)
    assert torch.equal(found, halved) and not torch.equal(halved, want)
    for handle in handles:
        handle.remove()
    assert torch.equal(both[0](*given), in_fp8)


def test_learns_and_can_be_restored():
    model, batch = model_of("llama", **SIZES["llama"]), batch_of("llama", 4, 32)
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    table = fastmp.accelerate(model, precision=FP8)
    assert fastmp.accelerate(model, precision=FP8) is table and list(model.state_dict()) == keys
    with pytest.raises(ValueError, match=r"with precision Fp8Recipe.* got 'dtype'; restore it"):
        fastmp.accelerate(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(step(model.train(), **batch)[0].loss.item())
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    fastmp.restore(model)
    assert [type(module) for module in model.modules()] == classes
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(2, 64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


def test_sizes_that_blocks_do_not_divide_are_kept_and_said():
    model = model_of("llama", **SIZES["llama"] | {"intermediate_size": 80})
    table = fastmp.accelerate(model, precision=FP8)
    (why,) = {why for name, why in table.kept.items() if name.endswith(".up_proj")}
    assert why == "FP8 blocks of 32 do not divide out_features 80"
    assert "FP8" in str(table) and "q_proj" in str(table)


def test_mistakes():
    model = model_of("llama", **SIZES["llama"])
    with pytest.raises(ValueError, match='expected precision "dtype", "fp8" or an Fp8Recipe, got \'bf16\''):
        fastmp.accelerate(model, precision="bf16")
