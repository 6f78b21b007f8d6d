"""Losses of logits with a large part in common, or of a large scale, are as accurate as torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from every_op_tools import implementation
from torch import Tensor

from fastmp import ops
from fastmp.tensor_parallel.linear_loss import (
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_log_probs,
)
from fastmp.tensor_parallel.loss import vocab_parallel_cross_entropy

N, V = 4, 517
OFFSETS = (0.0, 1e3, -1e4, 1e4, 1e6, 1e30)
SCALES = (30.0, 100.0, 1e4)
ULPS = 4  # beyond four times torch's error


class Loss(NamedTuple):
    """A loss (N,) of logits and targets, and the same from torch's `log_softmax` in any dtype."""

    ours: Callable[[Tensor, Tensor], Tensor]
    torchs: Callable[[Tensor, Tensor], Tensor]


def torch_loss(label_smoothing: float = 0.0, z_loss: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        found = F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)
        return found + z_loss * logits.logsumexp(1).square() if z_loss else found

    return loss


def whole(**options) -> Loss:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return ops.cross_entropy(logits, target, reduction="none", **options)

    return Loss(loss, torch_loss(**{key: x for key, x in options.items() if key != "grad_in_place"}))


def known(**options) -> Loss:
    """The gradient is computed with the loss, from the upstream gradient."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return ops.cross_entropy(logits * 1, target, reduction="none", loss_grad=torch.ones(N), **options)

    return Loss(loss, torch_loss(**options))


def sharded(**options) -> Loss:
    """From the statistics of three shards, the last of which is shorter."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        starts = (0, 200, 400)
        parts = [logits[:, start : start + 200] for start in starts]
        smoothing = options.get("label_smoothing", 0.0)
        stats = torch.stack(
            [
                torch.ops.fastmp.cross_entropy_stats(part.detach(), target, start, V, smoothing > 0)
                for start, part in zip(starts, parts)
            ]
        )
        losses = [
            ops.cross_entropy_from_stats(part, target, stats, vocab_start=start, vocab_size=V, **options)
            for start, part in zip(starts, parts)
        ]
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
        return _Join.apply(*losses)

    return Loss(loss, torch_loss(**options))


class _Join(torch.autograd.Function):
    """The loss that all shards have; its gradient goes to each of them."""

    @staticmethod
    def forward(ctx, *losses: Tensor) -> Tensor:
        return losses[0].clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, grad, grad


def linear(function: Callable[..., Tensor], **options) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss from hidden states: rows of the identity, so that the logits are exactly those given."""
    return lambda logits, target: function(torch.eye(N, dtype=logits.dtype), logits.t(), target, **options)


def linear_loss(function: Callable[..., Tensor] = ops.linear_cross_entropy, **options) -> Loss:
    theirs = torch_loss(**{key: x for key, x in options.items() if key in ("label_smoothing", "z_loss")})
    return Loss(linear(function, reduction="none", **options), theirs)


def chosen_log_probs(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    return (logits / temperature).log_softmax(1).gather(1, target[:, None])[:, 0]


def log_probs(function: Callable[..., Tensor] = ops.linear_log_probs, **options) -> Loss:
    return Loss(
        linear(function, **options),
        lambda logits, target: chosen_log_probs(logits, target, options.get("temperature", 1.0)),
    )


def entropies(logits: Tensor, target: Tensor) -> Tensor:
    return linear(ops.linear_log_probs, return_entropy=True)(logits, target)[1]


def torch_entropies(logits: Tensor, target: Tensor) -> Tensor:
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def teacher_of(logits: Tensor) -> Tensor:
    """Logits of a teacher that agrees with the student in part, with the same offset."""
    return logits.detach().roll(1, 1)


def distillation(beta: float) -> Loss:
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}[beta]

    def ours(logits: Tensor, target: Tensor) -> Tensor:
        eye, teacher = torch.eye(N, dtype=logits.dtype), teacher_of(logits)
        arguments = eye, logits.t(), eye, teacher.t()
        return ops.linear_distillation(*arguments, divergence=divergence, reduction="none")

    def torchs(logits: Tensor, target: Tensor) -> Tensor:
        log_p, log_q = logits.log_softmax(1), teacher_of(logits).log_softmax(1)
        a, b = (log_q, log_p) if beta == 0 else (log_p, log_q)
        return (a.exp() * (a - b)).sum(1)

    return Loss(ours, torchs)


IN_CHUNKS = {"workspace": 2 * V * 4}
EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-4}
LOSSES = {
    "cross_entropy": whole(),
    "cross_entropy smoothed": whole(label_smoothing=0.2),
    "cross_entropy z-loss": whole(z_loss=1e-4),
    "cross_entropy in place": whole(grad_in_place=True, label_smoothing=0.2),
    "cross_entropy at once": known(),
    "cross_entropy at once, everything": known(**EVERYTHING),
    "from_stats": sharded(),
    "from_stats everything": sharded(**EVERYTHING),
    "vocab_parallel": Loss(
        lambda logits, target: vocab_parallel_cross_entropy(logits, target, group=None), torch_loss()
    ),
    "linear few": linear_loss(),
    "linear chunks": linear_loss(token_weight=torch.ones(N), **IN_CHUNKS),
    "linear kept": linear_loss(token_weight=torch.ones(N), **EVERYTHING),
    "linear at once": linear_loss(loss_grad=1.0, token_weight=torch.ones(N), **EVERYTHING, **IN_CHUNKS),
    "linear vocab_parallel": linear_loss(vocab_parallel_linear_cross_entropy, group=None, **IN_CHUNKS),
    "log_probs": log_probs(),
    "log_probs temperature": log_probs(temperature=2.0, **IN_CHUNKS),
    "log_probs entropy": Loss(entropies, torch_entropies),
    "log_probs vocab_parallel": log_probs(vocab_parallel_linear_log_probs, group=None),
    "distillation forward": distillation(0.0),
    "distillation reverse": distillation(1.0),
}


def draw(dtype: torch.dtype, offset: float = 0.0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator, dtype=torch.float64) * scale + offset
    return logits.to(dtype), torch.randint(V, (N,), generator=generator)


def cases() -> Iterator[tuple[str, dict[str, float]]]:
    yield from ((f"offset {offset:g}", {"offset": offset}) for offset in OFFSETS)
    yield from ((f"scale {scale:g}", {"scale": scale}) for scale in SCALES)


def loss_and_grad(function: Callable, logits: Tensor, target: Tensor) -> list[Tensor]:
    logits = logits.clone().requires_grad_()
    loss = function(logits * 1, target)
    return [each.detach().double() for each in (loss, *torch.autograd.grad(loss.sum(), logits))]


def errors(loss: Loss, dtype: torch.dtype, case: dict[str, float]) -> list[tuple[float, float, float]]:
    """Return (our error, torch's, largest value) of the loss and of its gradient, against float64.

    torch gets narrow logits in float32, and its gradient is rounded to their dtype.
    """
    logits, target = draw(dtype, **case)
    truth = loss_and_grad(loss.torchs, logits.double(), target)
    ours = loss_and_grad(loss.ours, logits, target)
    theirs = loss_and_grad(lambda x, target: loss.torchs(x.float(), target), logits, target)
    return [
        tuple(x.item() for x in ((mine - true).abs().max(), (torchs - true).abs().max(), true.abs().max()))
        for mine, torchs, true in zip(ours, theirs, truth, strict=True)
    ]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_as_accurate_as_torch(name, dtype):
    for label, case in cases():
        (loss, grad), rounding = errors(LOSSES[name], dtype, case), torch.finfo(torch.float32).eps
        if loss[2] > torch.finfo(torch.float32).max:
            continue  # the z-loss of these logits is no float32
        for kind, (ours, torchs, largest), eps in (
            ("loss", loss, rounding), ("gradient", grad, torch.finfo(dtype).eps)
        ):  # fmt: skip
            bound = 4 * torchs + ULPS * eps * largest
            assert ours <= bound, f"{name}, {label}: error of the {kind} {ours:.2g}, torch {torchs:.2g}"


def by_ops(of: Callable[[str], Callable], smoothing: float, z_loss: float) -> Iterator[Loss]:
    """Yield the loss from whole rows, from shards, and with the gradient at once, of some implementation."""
    options = V, -100, smoothing, z_loss
    ones = torch.ones(N)

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
            loss, merged = of("cross_entropy")(logits, target, None, None, 0, *options, False)
            ctx.grad = of("cross_entropy_grad")(logits, target, merged, ones, None, 0, *options)
            return loss

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            return ctx.grad, None

    class Sharded(Whole):
        @staticmethod
        def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
            parts = {0: logits[:, :200], 200: logits[:, 200:400], 400: logits[:, 400:]}
            stats_of = of("cross_entropy_stats")
            stats = [stats_of(part, target, start, V, smoothing > 0) for start, part in parts.items()]
            loss, merged = of("cross_entropy_merge")(torch.stack(stats), target, None, *options)
            for start, part in parts.items():
                of("cross_entropy_grad_")(part, target, merged, ones, None, start, *options)
            ctx.grad = logits
            return loss

    class AtOnce(Whole):
        @staticmethod
        def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
            loss = of("cross_entropy_loss_grad_")(logits, target, ones, None, *options)
            ctx.grad = logits
            return loss

    for kind in (Whole, Sharded, AtOnce):
        yield Loss(kind.apply, torch_loss(smoothing, z_loss))


def check_backend(backend: str, some: Sequence[tuple[str, dict[str, float]]]) -> None:
    for options in ((0.0, 0.0), (0.2, 1e-4)):
        for loss in by_ops(lambda op: implementation(op, backend), *options):
            for label, case in some:
                found = errors(loss, torch.float32, case)
                if found[0][2] > torch.finfo(torch.float32).max:
                    continue
                for ours, torchs, largest in found:
                    bound = 4 * torchs + ULPS * torch.finfo(torch.float32).eps * largest
                    assert ours <= bound, (label, options, ours, torchs)


@pytest.mark.parametrize("backend", ("c++", "reference"))
def test_as_accurate_as_torch_by_every_op(backend):
    check_backend(backend, [*cases()])


@pytest.mark.interpret
def test_as_accurate_as_torch_in_triton():
    check_backend("triton", [("offset", {"offset": 1e4}), ("scale", {"scale": 100.0})])
