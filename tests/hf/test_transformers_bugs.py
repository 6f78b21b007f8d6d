"""Two bugs of expert parallelism that transformers has had, rebuilt: wrong there, right with fastmp.

Pull request 48205 fixed two parts: the rows of other ranks' experts, which grouped GEMMs leave unwritten,
gave NaN gradients; and each rank kept its own share of the gradient of router weights. Issue 48687: batched
GEMMs gave router weights of other ranks' experts the gradient of an expert that they had not chosen. The
losses were right in all three. transformers' functions are called without what fixed them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hf_models import Float64, batch_of, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fastmp
from fastmp.hf import experts_interface
from fastmp.testing.ops import poisoned_memory
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
moe = pytest.importorskip("transformers.integrations.moe")
parallel = pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="without expert parallelism"
)
if not hasattr(parallel, "AllReduceEP"):
    pytest.skip(
        f"transformers {transformers.__version__} has other expert parallelism", allow_module_level=True
    )

pytestmark = pytest.mark.full


def experts_of(family, dtype, part=None):
    """A module of 4 experts, or 2 of them as a rank of two has them, and its arguments."""
    model = model_of(family, dtype)
    module = next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "num_experts"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(16, 2, generator=generator, dtype=torch.float64).to(dtype)
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(16)])
    if part is not None:
        for name, parameter in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(parameter.data[2 * part : 2 * part + 2].clone())
        module.num_experts, module._is_expert_parallel = 2, True
        index = (index - 2 * part).where((index // 2) == part, 2)  # 2: an expert of the other rank
        weights = weights * (index < 2)
    return module, x.requires_grad_(), index, weights.requires_grad_()


def gradients(function, module, x, index, weights):
    """The output, and the gradients of x, of the router's weights and of the parameters."""
    output = function(module, x, index, weights)
    return output, *torch.autograd.grad(output.sum(), [x, weights, *module.parameters()])


def grouped_without_masks(self, hidden_states, top_k_index, top_k_weights):
    """transformers' grouped GEMMs before 48205: rows of other ranks' experts are masked first and last."""
    k, (ids, order) = top_k_index.shape[1], torch.sort(top_k_index.flatten())
    elsewhere = (ids >= self.num_experts)[:, None]
    ends = torch.bincount(ids, minlength=self.num_experts)[: self.num_experts].cumsum(0, dtype=torch.int32)
    own = ids.clamp(max=self.num_experts - 1)
    rows = hidden_states[order // k].masked_fill(elsewhere, 0)
    bias = (self.gate_up_proj_bias[own], self.down_proj_bias[own]) if self.has_bias else (None, None)
    rows = moe._grouped_linear(rows, self.gate_up_proj, ends, bias[0], self.is_transposed)
    rows = moe._grouped_linear(self._apply_gate(rows), self.down_proj, ends, bias[1], self.is_transposed)
    rows = (rows * top_k_weights.flatten()[order, None]).masked_fill(elsewhere, 0)
    return rows[order.argsort()].unflatten(0, (-1, k)).sum(1)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_unwritten_rows_give_no_nan(family):
    """48205, first part. New memory holds NaN, as what an earlier step has left may."""
    call = experts_of(family, torch.float32, part=0)
    elsewhere = call[2] >= 2
    assert 0 < elsewhere.sum() < elsewhere.numel()
    with poisoned_memory():
        theirs = gradients(grouped_without_masks, *call)
        ours = gradients(experts_interface.experts, *call)
    assert torch.equal(theirs[2].isnan(), elsewhere)  # the gradient of every router weight that is elsewhere
    assert not theirs[0].isnan().any()  # while the output shows nothing
    assert all(tensor.isfinite().all() for tensor in ours)
    assert not ours[2][elsewhere].any() and ours[2][~elsewhere].all()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)


def batched_without_mask(self, hidden_states, top_k_index, top_k_weights):
    """transformers' batched GEMMs before the fix of 48687: other ranks' experts become the last one."""
    k, own = top_k_index.shape[1], top_k_index.flatten().clamp(max=self.num_experts - 1)
    bias = (self.gate_up_proj_bias[own], self.down_proj_bias[own]) if self.has_bias else (None, None)
    rows = hidden_states.repeat_interleave(k, 0)
    rows = moe._batched_linear(rows, self.gate_up_proj[own], bias[0], self.is_transposed)
    rows = moe._batched_linear(self._apply_gate(rows), self.down_proj[own], bias[1], self.is_transposed)
    return (rows * top_k_weights.flatten()[:, None]).unflatten(0, (-1, k)).sum(1)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_router_weights_have_the_gradient_of_their_expert(family):
    """48687. Over two ranks outputs and gradients of router weights add up to those of all experts."""
    wanted = gradients(moe.batched_mm_experts_forward, *experts_of(family, torch.float64))[:3]
    largest = wanted[2].abs().max()
    errors = {}
    for function in (batched_without_mask, moe.batched_mm_experts_forward, experts_interface.experts):
        parts = [gradients(function, *experts_of(family, torch.float64, part))[:3] for part in (0, 1)]
        output, dx, dweights = (a + b for a, b in zip(*parts, strict=True))
        torch.testing.assert_close(
            (output, dx), wanted[:2], rtol=1e-9, atol=1e-12
        )  # only the router is wrong
        errors[function] = ((dweights - wanted[2]).abs().max() / largest).item()
    assert errors[batched_without_mask] > 0.1, errors
    assert errors[moe.batched_mm_experts_forward] < 1e-12  # the fix
    assert errors[experts_interface.experts] < 1e-12


def whole(model, name):
    grad = model.get_parameter(name).grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def over_ranks(how, rank):
    """A Qwen3-MoE whose experts are on two ranks."""
    model = model_of("qwen3_moe", torch.float64)
    if how == "group":
        fastmp.accelerate(model, group=dist.group.WORLD)
    elif how == "mesh":
        fastmp.accelerate(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep")))
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = model._expand_parallel_plan(dict(model.ep_plan))
        parallel.apply_expert_parallelism(model, mesh, mesh, plan, ep_implementation="all_reduce")
    return model


@pytest.mark.parametrize("how", ["transformers", "transformers before", "group", "mesh"])
def test_every_rank_has_the_whole_gradient_of_the_router(how, monkeypatch):
    """48205, second part, with the same tokens on both ranks."""
    batch, router = batch_of("qwen3_moe"), "model.layers.1.mlp.gate.weight"
    upstream = "model.layers.0.self_attn.q_proj.weight"
    one = model_of("qwen3_moe", torch.float64)
    with Float64():
        loss = one(**batch).loss
        loss.backward()

    class OfTokensAlone(parallel._AllReduceBackward):
        """Sums the gradients of tokens (T, H) over ranks, not those of router weights (T, k)."""

        @classmethod
        def apply(cls, x, group):
            return x if x.shape[-1] == 2 else parallel_apply(x, group)

    parallel_apply = parallel._AllReduceBackward.apply
    if how == "transformers before":
        monkeypatch.setattr(parallel, "_AllReduceBackward", OfTokensAlone)

    def run(rank, world_size):
        model = over_ranks(how, rank)
        with Float64():
            found = model(**batch).loss
            found.backward()
        assert found.item() == pytest.approx(loss.item(), rel=1e-9)  # the loss is right in any case
        errors = []
        for name in (router, upstream):
            wanted = one.get_parameter(name).grad
            grad = whole(model, name)
            grad = grad if grad.shape == wanted.shape else None  # a shard of attention, over a group
            errors.append(0.0 if grad is None else ((grad - wanted).abs().max() / wanted.abs().max()).item())
        return errors

    for at_router, above in run_ranks(run, 2, timeout=200):
        if how == "transformers before":
            assert at_router > 0.1 and above > 1e-4  # 0.36 and 0.0009 of the largest
        else:
            assert at_router < 1e-9 and above < 1e-9
