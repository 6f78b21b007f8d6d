"""What an op of fastmp does not take stays with transformers; without transformers installed."""

from __future__ import annotations

import copy
import sys
from contextlib import ExitStack
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

import fastmp
from fastmp.hf import patches
from fastmp.hf.heads import CausalLM, LossHead
from fastmp.hf.hooks import activation_form, has_user_hooks
from fastmp.hf.patches import (
    GatedMLP,
    GroupedRouter,
    LayerNormPatch,
    RMSNormPatch,
    patched_class,
    rotate,
    rotate_part,
)


@pytest.mark.parametrize("call", [fastmp.accelerate, fastmp.restore])
def test_without_transformers_one_error_says_what_to_type(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"transformers is not installed; pip install 'transformers>=5'$"):
        call(nn.Linear(2, 2))


class CallableHook:
    def __call__(self, module, *args):
        return None


def hook_of(package):
    """A hook that a module of this package defines, bound and with an argument given."""
    made = type("State", (), {"__module__": f"{package}.state", "call": lambda self, given, *args: None})
    made.call.__module__ = f"{package}.state"
    return partial(made().call, None)


HOOKS = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "forward with kwargs": lambda module, hook: module.register_forward_hook(hook, with_kwargs=True),
    "forward pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "full backward": lambda module, hook: module.register_full_backward_hook(hook),
    "full backward pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "backward": lambda module, hook: module.register_backward_hook(hook),
    "global forward": lambda module, hook: register_module_forward_hook(hook),
    "global forward pre": lambda module, hook: register_module_forward_pre_hook(hook),
    "global backward": lambda module, hook: register_module_full_backward_hook(hook),
    "global backward pre": lambda module, hook: register_module_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_users_are_found_and_those_that_move_weights_are_not(kind):
    module = nn.SiLU()
    assert not has_user_hooks(module) and activation_form(module) == "silu"
    packages = ("torch.distributed.fsdp", "deepspeed.runtime", "fastmp.optim")
    others = ("torch.distributed.tensor", "accelerate", "deepspeeder", "__main__", "torch.nn.utils")
    with ExitStack() as stack:
        for package in packages:
            stack.callback(HOOKS[kind](module, hook_of(package)).remove)
        assert not has_user_hooks(module)
        for hook in (lambda *args: None, CallableHook(), *map(hook_of, others)):
            with ExitStack() as alone:
                alone.callback(HOOKS[kind](module, hook).remove)
                assert has_user_hooks(module) and activation_form(module) is None
            assert not has_user_hooks(module)


def test_a_forward_set_on_a_module_counts_as_a_hook():
    module = nn.SiLU()
    own = module.forward
    module.forward = lambda x: own(x)
    assert has_user_hooks(module)
    module.forward = own  # as the Accelerate library leaves it
    assert not has_user_hooks(module)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SiLU(nn.Module):
    """Another activation of a name that fastmp knows."""

    def forward(self, x):
        return 2 * x


def with_hook():
    act_fn = nn.SiLU()
    act_fn.register_forward_hook(lambda module, args, output: output / 2)
    return act_fn


def with_forward():
    act_fn = nn.SiLU()
    act_fn.forward = torch.tanh
    return act_fn


@pytest.mark.parametrize("act_fn", [nn.SiLU, nn.ReLU, SiLU, with_hook, with_forward])
def test_an_activation_with_hooks_or_another_one_is_called(act_fn):
    mlp, x = MLP(), torch.randn(3, 4)
    replaced = copy.deepcopy(mlp)
    replaced.__class__ = patched_class(MLP, GatedMLP)
    torch.testing.assert_close(replaced(x), mlp(x))
    replaced.act_fn = mlp.act_fn = act_fn()
    torch.testing.assert_close(replaced(x), mlp(x))


class Model(nn.Module):
    head = staticmethod(CausalLM.head)
    called_otherwise = staticmethod(CausalLM.called_otherwise)

    def __init__(self):
        super().__init__()
        self.base_model, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.lm_head.__class__ = patched_class(nn.Linear, LossHead)


@pytest.mark.parametrize("name", ["base_model", "lm_head"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_model_with_hooks_on_its_head_or_decoder_computes_logits(name, kind):
    model, given = Model(), {"labels": torch.zeros(1)}
    assert CausalLM.wants_loss_alone(model, given)
    with ExitStack() as stack:
        stack.callback(HOOKS[kind](model.get_submodule(name), lambda *args: None).remove)
        assert not CausalLM.wants_loss_alone(model, given)
    assert CausalLM.wants_loss_alone(model, given)


def router(**values):
    usual = {"num_group": 2, "topk_group": 1, "top_k": 2, "weight": torch.zeros(8, 4)}
    return SimpleNamespace(**{**usual, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": 8}, "a token's 8 experts are more than there are in 1 groups of 4"),
        ({"num_group": 3}, "a token's 1 of 3 groups of 8 experts, which"),
        ({"topk_group": 3}, "a token's 3 of 2 groups of 8 experts, which"),
        ({"num_group": 0}, "a token's 1 of 0 groups"),
        ({"top_k": 0}, "a token's 0 experts"),
        ({"top_k": 8, "topk_group": 2}, None),
    ],
)
def test_routers_whose_groups_are_too_small_stay(values, message):
    why = GroupedRouter.why_not(router(**values))
    assert why == message if message is None else why.startswith(message)


class Quantized(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("part", "module"),
    [
        (RMSNormPatch, SimpleNamespace(variance_epsilon=1e-6)),
        (LayerNormPatch, SimpleNamespace(eps=1e-6, normalized_shape=(4,))),
        (CausalLM, None),
    ],
)
def test_weights_that_are_no_numbers_stay(part, module):
    def why(weight, **values):
        if part is not CausalLM:
            return part.why_not(SimpleNamespace(**{**vars(module), **values}, weight=weight))
        head = nn.Linear(4, 4)
        head.weight = nn.Parameter(weight, requires_grad=False)
        loss = SimpleNamespace(__name__="ForCausalLMLoss")
        return part.why_not(SimpleNamespace(lm_head=head, loss_function=loss))

    weight = torch.zeros(4, 4)
    assert why(weight) is None
    assert "its weight is torch.int8, which" in why(weight.to(torch.int8))
    assert "its weight is a Quantized, which may be quantized" in why(weight.as_subclass(Quantized))
    if part is not CausalLM:
        name = "eps" if part is LayerNormPatch else "variance_epsilon"
        assert why(weight, **{name: -1.0}) == "its epsilon is -1.0"


def turned(x, cos, sin):
    """Rotary positions of halves, by what the dtypes of the products are."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def heads_and_angles(of_q, of_k, of_table, width=8):
    angles = torch.linspace(0, 3, 5 * 4).reshape(1, 5, 4).repeat(1, 1, 2)
    q, k = (
        torch.randn(1, heads, 5, width, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2)
    )
    return q.to(of_q), k.to(of_k), angles.cos().to(of_table), angles.sin().to(of_table)


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "dtypes",
    [
        *[(BRAIN, BRAIN, HALF), (HALF, HALF, BRAIN), (SINGLE, SINGLE, HALF), (SINGLE, BRAIN, BRAIN)],
        *[(HALF, BRAIN, SINGLE), (DOUBLE, DOUBLE, SINGLE), (SINGLE, SINGLE, DOUBLE), (BRAIN, BRAIN, BRAIN)],
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
def test_tables_of_rotary_positions_in_any_dtype(dtypes):
    """An FP16 model under BF16 autocast has FP16 tables for BF16 queries."""
    q, k, cos, sin = heads_and_angles(*dtypes)
    for found, expected in zip(
        rotate(q, k, cos, sin), (turned(q, cos, sin), turned(k, cos, sin)), strict=True
    ):
        coarse = BRAIN in dtypes and expected.dtype == BRAIN
        torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=2e-2 if coarse else 1e-6)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_part_of_each_head_is_rotated_and_the_rest_is_copied(width):
    """GLM-4.5's half is a table as wide as half of a head, which other families rotate whole."""
    q, k, cos, sin = heads_and_angles(SINGLE, SINGLE, SINGLE)
    cos, sin = (torch.cat(2 * (table[..., : width // 2],), -1) for table in (cos, sin))
    either = patches._or_else(rotate_part, lambda *args: "theirs")
    for x, found in zip((q, k), either(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found[..., :width], turned(x[..., :width], cos, sin))
        assert torch.equal(found[..., width:], x[..., width:])
    assert either(q[..., : width - 1], k[..., : width - 1], cos, sin) == "theirs"


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q, k, cos[..., :6], sin[..., :6]),
        lambda q, k, cos, sin: (q[0], k[0], cos, sin),
        lambda q, k, cos, sin: (q, k, cos[0], sin[0]),
        lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin),
    ],
    ids=["widths", "heads", "tables", "learnt"],
)
def test_rotary_positions_of_another_form_are_left_to_transformers(change):
    given = heads_and_angles(SINGLE, SINGLE, SINGLE)
    either = patches._or_else(rotate, lambda *args: "theirs")
    assert either(*given) != "theirs" and either(*change(*given)) == "theirs"


def test_a_decorated_forward_of_attention_is_patched_inside():
    """transformers decorates forwards whose arguments were renamed."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        raise AssertionError("the original is called")

    scope = {"apply_rotary_pos_emb": apply_rotary_pos_emb, "__name__": "modeling"}
    exec("def forward(self, q, k, cos, sin):\n    return apply_rotary_pos_emb(q, k, cos, sin)\n", scope)

    class Original(nn.Module):
        @wraps(scope["forward"])
        def forward(self, *args, **kwargs):
            return scope["forward"](self, *args, **kwargs)

    patched = type("Patched", (patches.Attention, Original), patches.Attention.members(Original))
    q, k = torch.randn(2, 1, 3, 4, 8).unbind()
    cos, sin = torch.ones(1, 4, 8), torch.zeros(1, 4, 8)
    rotated = patched().forward(q, k, cos, sin)
    assert [torch.equal(*pair) for pair in zip(rotated, (q, k), strict=True)] == [True, True]
