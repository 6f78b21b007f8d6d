"""Logits of a fused head: not computed until something reads their values, and then those of the head."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import fastmp.ops
from fastmp.hf.logits import lazy_logits

READS = {
    "attribute": lambda logits: logits.softmax(-1),
    "function": lambda logits: torch.cat([logits, logits]),
    "index": lambda logits: logits[..., :-1, :],
    "operator": lambda logits: 1 - logits / 2,
    "in place": lambda logits: logits.clone().div_(2.0),
    "cast": lambda logits: logits.to(torch.float64),
    "casts": lambda logits: logits.double().float().argmax(-1),
    "copy": lambda logits: copy.deepcopy(logits.detach()),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "array": lambda logits: torch.from_numpy(logits.detach().numpy()),
    "list": lambda logits: torch.tensor(logits.tolist()),
    "rows": lambda logits: torch.stack(list(logits)),
    "op of fastmp": lambda logits: fastmp.ops.bias_gelu(logits, None),
}


class Joined(torch.autograd.Function):
    """As torch.nn.parallel.gather: arguments of a function in C++."""

    @staticmethod
    def forward(ctx, *parts):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.cat(parts)


READS["function in C++"] = lambda logits: Joined.apply(logits, logits)


def head_and_hidden(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(8, 11, bias=bias, dtype=dtype), torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("read", READS)
def test_what_reads_them_gets_the_logits_of_the_head(read):
    head, hidden = head_and_hidden()
    lazy = lazy_logits(head, hidden)
    found, expected = READS[read](lazy), READS[read](head(hidden))
    torch.testing.assert_close(found, expected)
    assert type(found) is torch.Tensor or found.dtype == torch.float64


def test_nothing_is_computed_for_what_wrappers_do_to_every_output():
    """Accelerate and FSDP cast, DDP copies and asks for gradients, FSDP sets hooks."""
    head, hidden = head_and_hidden(torch.bfloat16)
    calls, hooked = [], []
    head.register_forward_hook(lambda *_: calls.append(1))
    lazy = lazy_logits(head, hidden)
    assert lazy.shape == (2, 3, 11) and lazy.size(-1) == 11 and len(lazy) == 2 and lazy.is_floating_point()
    assert (lazy.dtype, lazy.device, lazy.requires_grad) == (torch.bfloat16, hidden.device, True)
    assert isinstance(lazy, torch.Tensor) and lazy.grad_fn is lazy._base is None
    shown = "LazyLogits(shape=(2, 3, 11), dtype=torch.bfloat16, not computed)"
    assert repr(lazy) == str(lazy) == f"{lazy}" == shown and f"{[lazy]}" == f"[{shown}]"
    other = lazy.clone().float()
    other.register_hook(lambda grad: hooked.append(grad.dtype))
    assert other.dtype == torch.float32 and not calls
    other.sum().backward()
    assert len(calls) == 1 and hooked == [torch.float32] and hidden.grad is not None
    other.sum()
    assert len(calls) == 1  # kept
    assert repr(other) == repr(other.computed) and len(calls) == 1


def test_their_gradient_is_that_of_logits_of_the_forward_pass():
    head, hidden = head_and_hidden()
    head(hidden).square().sum().backward()
    expected = hidden.grad, head.weight.grad, head.bias.grad
    hidden.grad = head.weight.grad = head.bias.grad = None
    lazy = lazy_logits(head, hidden)
    with torch.no_grad():
        assert not lazy.sum().requires_grad  # a metric looks first
    lazy.square().sum().backward()
    for found, wanted in zip((hidden.grad, head.weight.grad, head.bias.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        lazy = lazy_logits(head, hidden)
    assert not lazy.requires_grad and not lazy.sum().requires_grad


def test_they_have_the_dtype_of_the_forward_pass_under_autocast():
    head, hidden = head_and_hidden()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lazy, expected = lazy_logits(head, hidden), head(hidden)
    assert lazy.dtype == torch.bfloat16 and torch.equal(lazy, expected)
    assert not torch.is_autocast_enabled("cpu")


def test_hidden_states_and_logits_go_with_the_output():
    head, hidden = head_and_hidden()
    hidden = hidden * 1
    alive = [weakref.ref(hidden)]
    output = {"logits": lazy_logits(head, hidden)}
    alive.append(weakref.ref(output["logits"].computed or output["logits"]))
    output["logits"].sum()
    alive.append(weakref.ref(output["logits"].computed))
    gc.disable()
    try:
        del hidden, output
        assert [one() for one in alive] == [None] * 3
    finally:
        gc.enable()


def test_other_weights_than_those_of_the_forward_pass_raise():
    head, hidden = head_and_hidden()
    lazy, read = lazy_logits(head, hidden), lazy_logits(head, hidden)
    read.sum().backward()
    torch.optim.SGD(head.parameters(), 0.1).step()
    read.sum()
    with pytest.raises(RuntimeError, match=r"read outputs.logits before optimizer.step\(\)"):
        lazy.sum()
    head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"read outputs.logits before"):
        lazy.sum()


def test_hooks_that_came_after_the_forward_pass_do_not_change_its_logits():
    head, hidden = head_and_hidden()
    expected, lazy = head(hidden), lazy_logits(head, hidden)
    head.register_forward_hook(lambda module, args, output: output / 2)
    torch.testing.assert_close(lazy.clone() + 0, expected)
    lazy.sum().backward()
    assert hidden.grad is not None and head.weight.grad is not None


@pytest.mark.full
def test_a_compiled_graph_returns_them_without_their_gradient():
    head, hidden = head_and_hidden()

    def step(hidden):
        return {"loss": head(hidden).logsumexp(-1).mean(), "logits": lazy_logits(head, hidden)}

    torch._dynamo.reset()
    output = torch.compile(step, backend="aot_eager", fullgraph=True)(hidden)
    torch.testing.assert_close(output["logits"], head(hidden))
    with pytest.raises(RuntimeError, match="logits: logits of a compiled training step have no gradient"):
        (output["loss"] + output["logits"].sum()).backward()
    output["loss"].backward()
    assert torch.equal(output["logits"].argmax(-1), head(hidden).argmax(-1))
