"""Hooks of submodules: a patched forward that skips a submodule, or calls it otherwise, asks here first.

A fused op computes what several modules compute one by one, so hooks on these modules would not run, or would
get another tensor than in transformers. Where there are any, transformers' own code runs instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

__all__ = ["activation_form", "form_of", "has_user_hooks"]

# their hooks gather, move or cast weights for the call of a module; results stay the same
_NEUTRAL = (
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "deepspeed.",
    "fastmp.",
)

# {class of an activation in transformers or torch: `form` of fastmp's gated and grouped ops}
_FORMS = {
    ("transformers.activations", "SiLUActivation"): "silu",
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "NewGELUActivation"): "gelu_tanh",
}


def has_user_hooks(module: nn.Module) -> bool:
    """Return True if the call of a module runs more than the forward of its class.

    Hooks of any kind count, also those of all modules, and a `forward` set on the module, as Accelerate's
    hooks set one. Hooks of FSDP2, DeepSpeed and fastmp do not: they only bring weights to where the module
    computes.
    """
    if "forward" in module.__dict__ and not _is_own(module.__dict__["forward"], module):
        return True
    if not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return False
    for hooks in (
        *(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks),
        *(module._backward_pre_hooks, _global_forward_hooks, _global_forward_pre_hooks),
        *(_global_backward_hooks, _global_backward_pre_hooks),
    ):
        for hook in hooks.values():
            if not _is_neutral(hook):
                return True
    return False


def _is_own(forward: Any, module: nn.Module) -> bool:
    """Return True for the `forward` of the class, which Accelerate sets when it removes its hooks."""
    own = getattr(forward, "__func__", None) is type(module).forward
    return own and forward.__self__ is module


def _is_neutral(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(_NEUTRAL)


def form_of(cls: type) -> str | None:
    """Return the `form` that an activation class has in fastmp's ops, or None."""
    return _FORMS.get((cls.__module__, cls.__qualname__))


def activation_form(act_fn: Any) -> str | None:
    """Return the `form` of fastmp's ops that computes what calling `act_fn` does, or None."""
    form = form_of(type(act_fn))
    return None if form is None or has_user_hooks(act_fn) else form
