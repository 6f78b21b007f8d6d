"""Logits of a training step that are computed on first access.

A fused head computes the loss without logits. `LazyLogits` takes their place in the model's output: it holds
the hidden states and the head, and torch functions that read its values compute the logits.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fastmp.hf.hooks import has_user_hooks

__all__ = ["LazyLogits", "lazy_logits"]

# functions that read no values: shape, dtype and device are known before the logits
_METADATA = {
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("is_cuda", "is_meta", "is_sparse", "itemsize")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
}
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
_HISTORY = [vars(torch._C.TensorBase)[name].__get__ for name in ("grad_fn", "_base")]
_CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


class _HeadCall(NamedTuple):
    """Settings of the head for computing logits from hidden states.

    Args:
        head: the module, called with hidden states; None in a compiled graph, which has weight and bias.
        autocast: (enabled, dtype) of autocast in the forward pass.
        recorded: the forward pass ran in grad mode.
        columns: size of the vocabulary.
        dtype: of the logits.
        hooked: the head had user hooks in the forward pass.
    """

    head: nn.Module | None
    autocast: tuple[bool, torch.dtype]
    recorded: bool
    columns: int
    dtype: torch.dtype
    hooked: bool = False


class LazyLogits(Tensor):
    """Logits (..., V) of hidden states (..., H), computed on first access to their values.

    Casts, copies and gradient hooks, which DDP, FSDP and Accelerate apply to every output, are deferred as
    well. In grad mode the logits have a gradient, as if computed in the forward pass; logits of a compiled
    graph have none, and a backward pass through them raises RuntimeError.

    Example (needs a pretrained model):
        >>> outputs = accelerated_model(input_ids=tokens, labels=tokens)
        >>> outputs.logits.shape  # known without computing the logits
        >>> outputs.logits.argmax(-1)  # computes them, once
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    call: _HeadCall

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _HeadCall) -> LazyLogits:
        shape = (*hidden.shape[:-1], call.columns)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=call.dtype, device=hidden.device)

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _HeadCall) -> None:
        self.hidden, self.weight, self.bias, self.call = hidden, weight, bias, call
        self.computed: Tensor | None = None
        self._hooks: OrderedDict[int, Any] = OrderedDict()
        self._weight_version = None if weight.is_inference() else weight._version

    def value(self) -> Tensor:
        """Return the logits, with a gradient in grad mode unless they belong to a compiled graph.

        Raises:
            RuntimeError: the head's weight has changed since the forward pass, or is sharded again.
        """
        wants_grad = torch.is_grad_enabled() and self._has_grad()
        if self.computed is None or (wants_grad and not self.computed.requires_grad):
            self.computed = self._compute()
            if self.computed.requires_grad:
                for hook in self._hooks.values():
                    self.computed.register_hook(hook)
        return self.computed

    def _has_grad(self) -> bool:
        trained = self.call.head is None or self.hidden.requires_grad or self.weight.requires_grad
        return self.call.recorded and trained

    def _compute(self) -> Tensor:
        head, (enabled, dtype) = self.call.head, self.call.autocast
        if self._weight_version is not None and self._weight_version != self.weight._version:
            raise RuntimeError(
                "logits: the weight of the head has changed since the forward pass; read outputs.logits "
                "before optimizer.step()"
            )
        if head is not None and type(head.weight) is not type(self.weight):
            raise RuntimeError(
                "logits: the weight of the head is sharded again; read outputs.logits before loss.backward()"
            )
        # hooks registered since the forward pass, which had none
        later = head is not None and not self.call.hooked and has_user_hooks(head)
        if later and isinstance(self.weight, DTensor):
            raise RuntimeError(
                "logits: hooks were registered on the head of a sharded model since the forward pass; read "
                "outputs.logits before"
            )
        recorded = torch.is_grad_enabled() and self._has_grad()
        with (
            torch.autocast(self.hidden.device.type, dtype=dtype, enabled=enabled),
            torch.set_grad_enabled(recorded),
        ):
            if head is not None and not later:
                return head(self.hidden).to(self.call.dtype)
            logits = F.linear(self.hidden, self.weight, self.bias).to(self.call.dtype)
            return _Detached.apply(logits.requires_grad_()) if recorded and head is None else logits

    def _like(self, dtype: torch.dtype) -> LazyLogits:
        other = LazyLogits(self.hidden, self.weight, self.bias, self.call._replace(dtype=dtype))
        other._weight_version, other._hooks = self._weight_version, self._hooks.copy()
        return other

    def _is_traced(self) -> bool:
        """Return True inside torch.compile, whose own tensors have no values."""
        return self.call.head is None and type(self.hidden) is not Tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the values if they are computed already: a sharded head gathers its weight to compute them."""
        if self.computed is None or self._is_traced():
            return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"
        return repr(self.computed)

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        traced = type(first) is LazyLogits and first._is_traced()
        if traced or func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if type(first) is LazyLogits and first.computed is None:
            if func is Tensor.register_hook:
                handle = RemovableHandle(first._hooks)
                first._hooks[handle.id] = args[1]
                return handle
            if func == _REQUIRES_GRAD:
                return first._has_grad()
            if func in _HISTORY:
                return None
            if func in (Tensor.clone, torch.clone):
                return first._like(first.call.dtype)
            if func is Tensor.to and len(args) == 2 and not kwargs and isinstance(args[1], torch.dtype):
                return first._like(args[1])
            if func in _CASTS:
                return first._like(_CASTS[func])
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.value, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the logits for functions that reach this point below autograd, such as those in C++."""
        args, kwargs = tree_map_only(LazyLogits, lambda lazy: lazy.value().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    # torch.compile: the tensors a compiled graph returns in its place, and its reconstruction from them.

    def __tensor_flatten__(self) -> tuple[list[str], _HeadCall]:
        return ["hidden", "weight", *([] if self.bias is None else ["bias"])], self.call

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], call: _HeadCall, outer_size: Any, outer_stride: Any
    ) -> LazyLogits:
        return LazyLogits(inner["hidden"], inner["weight"], inner.get("bias"), call)


class _Detached(torch.autograd.Function):
    """Raise an error in a backward pass that would silently lose a gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "logits: logits of a compiled training step have no gradient; set model.loss_function = "
            "model.loss_function before torch.compile to compute them in the forward pass"
        )


@torch._dynamo.allow_in_graph
def _in_graph(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: int, enabled: bool, dtype: torch.dtype,
    recorded: bool,
) -> Tensor:  # fmt: skip
    call = _HeadCall(None, (enabled, dtype), recorded, columns, dtype if enabled else hidden.dtype)
    return LazyLogits(hidden, weight, bias, call)


def lazy_logits(head: Any, hidden: Tensor) -> Tensor | None:
    """Return lazy logits of `head`, a linear layer, for hidden states (..., H), or None.

    None for a vocabulary-parallel head: gathering its logits on one rank alone would hang. In a compiled
    graph, also None for the head of an FSDP model, whose weight is freed before the logits could be read.
    """
    if getattr(head, "group", None) is not None:
        return None
    kind = hidden.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    recorded, columns = torch.is_grad_enabled(), head.out_features
    if not torch.compiler.is_compiling():
        given = dtype if enabled else hidden.dtype
        call = _HeadCall(head, (enabled, dtype), recorded, columns, given, has_user_hooks(head))
        return LazyLogits(hidden, head.weight, head.bias, call)
    if len(head.weight) != columns or getattr(head, "_is_fsdp_managed_module", False):
        return None
    bias = None if head.bias is None else head.bias.detach()
    return _in_graph(hidden.detach(), head.weight.detach(), bias, columns, enabled, dtype, recorded)
