"""Logits of a training step that are computed when something reads them.

A fused head makes the loss without logits. `LazyLogits` stands for them in the output of the model: it holds
the hidden states and the head, and every function of torch that needs values gets the logits from it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

__all__ = ["LazyLogits", "lazy_logits"]

# functions that need no values: shape, dtype and device are known before the logits
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


class _How(NamedTuple):
    """How logits follow from hidden states.

    head: the module, called with hidden states; None in a compiled graph, which has the weight and the bias.
    autocast: whether the forward pass ran under autocast, and its dtype. recorded: whether in grad mode.
    columns, dtype: of the result.
    """

    head: nn.Module | None
    autocast: tuple[bool, torch.dtype]
    recorded: bool
    columns: int
    dtype: torch.dtype


class LazyLogits(Tensor):
    """Logits (..., V) of hidden states (..., H), computed on the first access to their values.

    Casts, copies and gradient hooks are kept for that moment, too: DDP, FSDP and Accelerate apply them to
    every output. In grad mode the logits have the gradient that those of a forward pass have; logits of a
    compiled graph have none, and a backward pass through them raises RuntimeError.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    how: _How

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> LazyLogits:
        shape = (*hidden.shape[:-1], how.columns)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=how.dtype, device=hidden.device)

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> None:
        self.hidden, self.weight, self.bias, self.how = hidden, weight, bias, how
        self.computed: Tensor | None = None
        self._hooks: OrderedDict[int, Any] = OrderedDict()
        self._of_weight = None if weight.is_inference() else weight._version

    def value(self) -> Tensor:
        """Return the logits; in grad mode with their gradient, unless their graph has none.

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
        trained = self.how.head is None or self.hidden.requires_grad or self.weight.requires_grad
        return self.how.recorded and trained

    def _compute(self) -> Tensor:
        head, (enabled, dtype) = self.how.head, self.how.autocast
        if self._of_weight is not None and self._of_weight != self.weight._version:
            raise RuntimeError(
                "logits: the weight of the head has changed since the forward pass; read outputs.logits "
                "before optimizer.step()"
            )
        if head is not None and type(head.weight) is not type(self.weight):
            raise RuntimeError(
                "logits: the weight of the head is sharded again; read outputs.logits before loss.backward()"
            )
        recorded = torch.is_grad_enabled() and self._has_grad()
        with (
            torch.autocast(self.hidden.device.type, dtype=dtype, enabled=enabled),
            torch.set_grad_enabled(recorded),
        ):
            if head is not None:
                return head(self.hidden).to(self.how.dtype)
            logits = F.linear(self.hidden, self.weight, self.bias).to(self.how.dtype)
            return _Detached.apply(logits.requires_grad_()) if recorded else logits

    def _like(self, dtype: torch.dtype) -> LazyLogits:
        other = LazyLogits(self.hidden, self.weight, self.bias, self.how._replace(dtype=dtype))
        other._of_weight, other._hooks = self._of_weight, self._hooks.copy()
        return other

    def _is_traced(self) -> bool:
        """Return True inside torch.compile, whose own tensors have no values."""
        return self.how.head is None and type(self.hidden) is not Tensor

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
                return first._like(first.how.dtype)
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
        """Below autograd, where functions in C++ arrive that know no subclass."""
        args, kwargs = tree_map_only(LazyLogits, lambda lazy: lazy.value().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    # What a compiled graph returns of it, and makes it from.

    def __tensor_flatten__(self) -> tuple[list[str], _How]:
        return ["hidden", "weight", *([] if self.bias is None else ["bias"])], self.how

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], how: _How, outer_size: Any, outer_stride: Any
    ) -> LazyLogits:
        return LazyLogits(inner["hidden"], inner["weight"], inner.get("bias"), how)


class _Detached(torch.autograd.Function):
    """Let a backward pass fail that would lose a gradient in silence."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "logits: those of a compiled training step have no gradient; set model.loss_function = "
            "model.loss_function before torch.compile to have them made in the forward pass"
        )


@torch._dynamo.allow_in_graph
def _in_graph(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: int, enabled: bool, dtype: torch.dtype,
    recorded: bool,
) -> Tensor:  # fmt: skip
    how = _How(None, (enabled, dtype), recorded, columns, dtype if enabled else hidden.dtype)
    return LazyLogits(hidden, weight, bias, how)


def lazy_logits(head: Any, hidden: Tensor) -> Tensor | None:
    """Return the logits that `head`, a linear layer, gives of `hidden`, computed when something reads them.

    None for a head divided over a group: its logits are gathered, and a rank that reads them alone would
    hang. In a compiled graph, also None for the head of a sharded model, whose weight is not there later.
    """
    if getattr(head, "group", None) is not None:
        return None
    kind = hidden.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    recorded, columns = torch.is_grad_enabled(), head.out_features
    if not torch.compiler.is_compiling():
        how = _How(head, (enabled, dtype), recorded, columns, dtype if enabled else hidden.dtype)
        return LazyLogits(hidden, head.weight, head.bias, how)
    if len(head.weight) != columns or getattr(head, "_is_fsdp_managed_module", False):
        return None
    bias = None if head.bias is None else head.bias.detach()
    return _in_graph(hidden.detach(), head.weight.detach(), bias, columns, enabled, dtype, recorded)
