"""Router replay for models of transformers, accelerated or not, and for fastmp's own.

A router of transformers returns (logits, weights, experts). Its code chooses with `torch.topk`, and makes
weights of what that returns: while it runs in a context, the last choice returns the experts given and
their scores, so that weights, with their gradients, are those of transformers' own code. Routers patched
by `accelerate` pass the experts to `topk_router`.

L layers with experts, B batch, S sequence, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastmp.hf.patches import GroupedRouter
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.moe.routing import DTYPE, Routing, RoutingRecorder, routed
from fastmp.ops.core.registry import can_read_values

__all__ = ["record_routing", "replay_routing"]


class _ModelRecorder(RoutingRecorder):
    """Experts of a transformers model: of each forward and layer, (T, k), and the batch size of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.chosen: list[list[Tensor]] = []

    def routing(self) -> Routing:
        if not self.chosen:
            return super().routing()
        if not self.batches or any(len(layer) != len(self.batches) for layer in self.chosen):
            raise ValueError(
                "record_routing: expected forwards of the model inside the context, each through all layers"
            )
        parts = [
            torch.stack([experts.unflatten(0, (B, -1)) for experts in call])
            for B, call in zip(self.batches, zip(*self.chosen, strict=True))
        ]
        return Routing(torch.cat(parts, 2).to(DTYPE))


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecorder]:
    """Record the experts that a model chooses in a context.

    Forwards that continue each other, as in `model.generate`, are recorded one after the other: the routing
    of a generation has the tokens of its output but the last.

    Args:
        model: a model of transformers with experts, accelerated or not, or a fastmp GPT.

    Yields:
        A recorder, whose `routing()` returns the `Routing` (L, B, S, k) of all tokens.

    Raises:
        ValueError: the model has no experts.

    Example (needs a model of transformers):
        with fastmp.record_routing(model) as recorder:
            ids = model.generate(prompts, max_new_tokens=20)
        with fastmp.replay_routing(model, recorder.routing()):
            logits = model(ids[:, :-1]).logits
    """
    if _is_own(model):
        own = RoutingRecorder()
        with routed(model, own):
            yield own
        return
    routers = _routers("record_routing", model)
    recorder = _ModelRecorder()
    recorder.chosen = [[] for _ in routers]
    with ExitStack() as stack:
        for router, chosen in zip(routers, recorder.chosen):
            stack.enter_context(_Wrapped(router, _recording(router, chosen)))
        stack.callback(model.register_forward_pre_hook(_batch_of(recorder.batches), with_kwargs=True).remove)
        yield recorder


def _recording(router: Any, chosen: list[Tensor]) -> Callable[..., Any]:
    def recorded(forward: Callable[..., Any], hidden: tuple[Any, ...]) -> Any:
        x, k = hidden[0], router.top_k
        if isinstance(router, GroupedRouter) and router.given_experts is None:
            # all tokens choose, and their weights have the bits of a replay
            given = x.new_full((x.numel() // x.shape[-1], k), -1, dtype=torch.int64)
            result = _with_experts(router, given, forward, hidden)
        else:
            result = forward(*hidden)
        chosen.append(result[2].detach().clone())
        return result

    return recorded


def _with_experts(router: Any, given: Tensor, forward: Callable[..., Any], hidden: tuple[Any, ...]) -> Any:
    router.given_experts = given
    try:
        return forward(*hidden)
    finally:
        router.given_experts = None


def _batch_of(batches: list[int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args]
        batches.append(next(len(x) for x in given if isinstance(x, Tensor)))

    return hook


@contextmanager
def replay_routing(model: nn.Module, routing: Routing) -> Iterator[None]:
    """Let forwards of a model in a context use given experts, with weights of its current routers.

    Gradient checkpointing runs forwards again in backward: keep backward in the context then.

    Args:
        model: as in `record_routing`.
        routing: of the tokens (B, S) of every forward inside. A token with -1 chooses its experts.

    Raises:
        ValueError: the model has no experts, its router drops scores (DeepSeek-V2's unless accelerated) or
            chooses without `torch.topk` (PhiMoE's), or the routing is of another number of layers, tokens or
            experts.

    Example (needs a model of transformers):
        with fastmp.replay_routing(model, routing):
            loss = model(ids, labels=ids).loss
        loss.backward()
    """
    if not isinstance(routing, Routing):
        raise ValueError(
            f"replay_routing: expected a Routing, got {type(routing).__name__}; pass Routing(experts), or "
            "recorder.routing()"
        )
    if _is_own(model):
        with routed(model, routing):
            yield
        return
    routers = _routers("replay_routing", model)
    if len(routers) != len(routing.experts):
        raise ValueError(
            f"replay_routing: expected experts of {len(routers)} layers, got those of {len(routing.experts)}"
        )
    with ExitStack() as stack:
        for router, experts_BSk in zip(routers, routing.experts):
            grouped = getattr(router, "topk_method", "greedy") != "greedy"
            if grouped and not isinstance(router, GroupedRouter):
                raise ValueError(
                    f"replay_routing: {type(router).__name__} drops the scores of other groups; expected a "
                    "model after fastmp.accelerate(model)"
                )
            if experts_BSk.shape[-1] != router.top_k:
                raise ValueError(
                    f"replay_routing: expected {router.top_k} experts of a token, got {experts_BSk.shape[-1]}"
                )
            if can_read_values(experts_BSk) and experts_BSk.numel():
                largest, num_experts = int(experts_BSk.max()), len(router.weight)
                if largest >= num_experts:
                    raise ValueError(
                        f"replay_routing: expected experts below {num_experts}, got expert {largest}"
                    )
            given = experts_BSk.flatten(0, 1).to(router.weight.device, torch.int64)
            stack.enter_context(_Wrapped(router, _replaying(router, given)))
        yield


def _replaying(router: Any, given: Tensor) -> Callable[..., Any]:
    def replayed(forward: Callable[..., Any], hidden: tuple[Any, ...]) -> Any:
        tokens = hidden[0].numel() // hidden[0].shape[-1]
        if tokens != len(given):
            raise ValueError(f"replay_routing: expected the experts of {tokens} tokens, got {len(given)}")
        if isinstance(router, GroupedRouter):
            return _with_experts(router, given, forward, hidden)
        with _GivenExperts(given, len(router.weight)) as choice:
            result = forward(*hidden)
        if not choice.replaced:
            raise ValueError(
                f"replay_routing: {type(router).__name__} does not choose experts by torch.topk; expected a "
                "router that does, as Mixtral's"
            )
        return result

    return replayed


def _is_own(model: nn.Module) -> bool:
    return any(isinstance(module, MoELayer) for module in model.modules())


def _routers(name: str, model: nn.Module) -> list[Any]:
    """Return the routers of a model of transformers in the order of its layers."""
    found: list[Any] = [
        module
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter") and hasattr(module, "top_k")
    ]
    if not found:
        raise ValueError(f"{name}: {type(model).__name__} has no router of experts that fastmp knows")
    return found


class _Wrapped:
    """A context in which `module.forward` goes through a function."""

    def __init__(self, module: nn.Module, through: Callable[..., Any]) -> None:
        self.module, self.through = module, through
        self.before = vars(module).get("forward")

    def __enter__(self) -> None:
        forward = self.module.forward
        self.module.forward = lambda *hidden: self.through(forward, hidden)

    def __exit__(self, *error: Any) -> None:
        if self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before


class _GivenExperts(TorchFunctionMode):
    """Let `torch.topk` over all experts return those given, (T, k), where they are not negative."""

    def __init__(self, given: Tensor, num_experts: int) -> None:
        super().__init__()
        self.given, self.num_experts, self.replaced = given, num_experts, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        scores, indices = args[0], result[1]
        if scores.shape != (len(self.given), self.num_experts) or indices.shape != self.given.shape:
            return result  # a choice of groups
        chosen = self.given.where((self.given >= 0).all(-1, keepdim=True), indices)
        self.replaced = True
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
