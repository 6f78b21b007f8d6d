"""Cross-entropy as users call it: shards, padding, gradients in place, saved tensors, errors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from fastmp.ops import cross_entropy, cross_entropy_from_stats

EXACT = {"rtol": 1e-12, "atol": 1e-12}
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "weighted": True},
]


def torch_loss(
    logits, target, *, label_smoothing=0.0, z_loss=0.0, token_weight=None, ignore_index=-100
) -> Tensor:
    """The same loss from torch's own functions; -inf and NaN behave as they do there."""
    loss = F.cross_entropy(
        logits, target, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(1).square().masked_fill(target == ignore_index, 0)
    return loss if token_weight is None else loss * token_weight


per_token = partial(cross_entropy, reduction="none")


def loss_and_grad(
    function, logits: Tensor, target: Tensor, grad_loss: Tensor, **options
) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    loss = function(logits, target, **options)
    (grad,) = torch.autograd.grad(loss, logits, grad_loss.to(loss.dtype))
    return loss.detach(), grad


def case(tokens: int, columns: int, dtype=torch.float64, seed: int = 0, scale: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) * scale
    target = torch.randint(columns, (tokens,), generator=generator)
    weight = torch.rand(tokens, generator=generator, dtype=torch.float64)
    grad_loss = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return logits.to(dtype), target, weight, grad_loss


def keywords(options: dict, weight: Tensor) -> dict:
    chosen = {key: value for key, value in options.items() if key != "weighted"}
    return {**chosen, "token_weight": weight} if options.get("weighted") else chosen


def sharded(
    logits: Tensor, target: Tensor, shards: int, vocab_size: int, **options
) -> tuple[list[Tensor], list[Tensor]]:
    """The loss on each of `shards` equal shards, and these, as vocabulary-parallel ranks have them."""
    with_sum = options.get("label_smoothing", 0) > 0
    width = logits.shape[1] // shards
    parts = [part.detach().clone().requires_grad_() for part in logits.split(width, 1)]
    stats = torch.stack(
        [
            torch.ops.fastmp.cross_entropy_stats(part.detach(), target, rank * width, vocab_size, with_sum)
            for rank, part in enumerate(parts)
        ]
    )
    losses = [
        cross_entropy_from_stats(
            part, target, stats, vocab_start=rank * width, vocab_size=vocab_size, **options
        )
        for rank, part in enumerate(parts)
    ]
    return losses, parts


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_shards_merge_into_the_whole(shards, options):
    """With padding columns (real vocabulary 43 of 48), so that the last shard has fewer real ones."""
    logits, target, weight, grad_loss = case(9, 48)
    target = target.clamp(max=42)
    target[4] = -100
    options = keywords(options, weight)
    whole = loss_and_grad(torch_loss, logits[:, :43], target, grad_loss, **options)
    losses, parts = sharded(logits, target, shards, 43, **options)
    for loss in losses:
        assert_close(loss.detach(), whole[0], **EXACT)
    grads = [torch.autograd.grad(loss, part, grad_loss)[0] for loss, part in zip(losses, parts)]
    assert_close(torch.cat(grads, 1)[:, :43], whole[1], **EXACT)
    assert torch.cat(grads, 1)[:, 43:].count_nonzero() == 0


def test_shards_without_finite_or_real_columns():
    """A shard of -inf, and one of padding only, add nothing; a row of -inf everywhere is NaN, as in torch."""
    logits, target, _, grad_loss = case(6, 16)
    logits[0, 4:8] = logits[1, :4] = logits[2] = -math.inf
    target = target.clamp(max=3)
    target[1] = 5
    losses, parts = sharded(logits, target, 4, 12)
    whole = loss_and_grad(torch_loss, logits[:, :12], target, grad_loss)
    assert whole[0][:2].isfinite().all() and whole[0][2].isnan()
    for rank, (loss, part) in enumerate(zip(losses, parts)):
        assert_close(loss.detach(), whole[0], equal_nan=True, **EXACT)
        (grad,) = torch.autograd.grad(loss, part, grad_loss)
        expected = (
            whole[1][:, 4 * rank : 4 * rank + 4] if rank < 3 else torch.zeros(6, 4, dtype=torch.float64)
        )
        assert_close(grad, expected, equal_nan=True, **EXACT)


def test_leading_dimensions():
    logits, target, weight, grad_loss = case(24, 11)
    flat = loss_and_grad(per_token, logits, target, grad_loss, token_weight=weight)
    for shape in [(4, 6), (2, 3, 4)]:
        weighted = {"token_weight": weight.view(shape)}
        loss, grad = loss_and_grad(
            per_token, logits.view(*shape, 11), target.view(shape), grad_loss.view(shape), **weighted
        )
        assert_close((loss.flatten(), grad.view(24, 11)), flat, rtol=0, atol=0)
    alone = cross_entropy(logits[0], target[0], reduction="none")
    assert alone.shape == ()
    assert_close(alone, flat[0][0] / weight[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize("vocab_size", [1, 40, 48])
def test_padding_columns_do_not_exist(vocab_size):
    logits, target, _, grad_loss = case(8, 48)
    target = target % vocab_size
    logits[:, vocab_size:] = math.nan
    options = {"label_smoothing": 0.3, "z_loss": 0.1}
    loss, grad = loss_and_grad(per_token, logits, target, grad_loss, vocab_size=vocab_size, **options)
    expected = loss_and_grad(torch_loss, logits[:, :vocab_size], target, grad_loss, **options)
    assert_close((loss, grad[:, :vocab_size]), expected, **EXACT)
    assert grad[:, vocab_size:].count_nonzero() == 0


def test_ignored_tokens_are_zero_whatever_their_logits():
    logits, target, _, grad_loss = case(4, 9)
    logits[0], target[0] = math.nan, 7
    logits[1], target[1] = -math.inf, 7
    loss, grad = loss_and_grad(per_token, logits, target.where(target == 7, 3), grad_loss, ignore_index=7)
    assert loss[:2].tolist() == [0, 0] and grad[:2].count_nonzero() == 0
    assert (loss[2:] > 0).all() and grad[2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradient_in_place_is_bitwise_the_same(dtype):
    logits, target, weight, grad_loss = case(9, 1009, dtype)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "token_weight": weight, "vocab_size": 1001}
    target = target.clamp(max=1000)
    expected = loss_and_grad(per_token, logits, target, grad_loss, **options)
    overwritten = logits.clone().requires_grad_()
    loss = cross_entropy(overwritten, target, grad_in_place=True, **options, reduction="none")
    (grad,) = torch.autograd.grad(loss, overwritten, grad_loss.to(loss.dtype))
    assert grad.data_ptr() == overwritten.data_ptr()
    assert_close((loss, grad), expected, rtol=0, atol=0)


def test_after_a_gradient_in_place_nobody_reads_the_logits():
    logits, target, _, _ = case(5, 7)
    hidden = logits.requires_grad_()
    loss = cross_entropy(hidden * 2, target, grad_in_place=True, reduction="none").sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"cross_entropy: .* there is no second backward"):
        loss.backward()

    doubled = hidden * 2
    entropy = doubled.exp().sum()  # saves its result, not the logits
    other = doubled.square().sum()  # saves the logits
    cross_entropy(doubled, target, grad_in_place=True, reduction="none").sum().backward(retain_graph=True)
    entropy.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_a_second_derivative_is_refused():
    logits, target, _, _ = case(3, 5)
    logits.requires_grad_()
    for options in ({"grad_in_place": True}, {"loss_grad": torch.ones(3)}):
        with pytest.raises(RuntimeError, match="not differentiable"):
            torch.autograd.grad(
                cross_entropy(logits, target, **options, reduction="none").sum(), logits, create_graph=True
            )
    (grad,) = torch.autograd.grad(
        cross_entropy(logits, target, reduction="none").sum(), logits, create_graph=True
    )
    with pytest.raises(RuntimeError, match="cross_entropy_grad: this op has no derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_logits_and_four_numbers_a_token_are_kept(dtype):
    tokens, columns = 64, 1000
    logits, target, weight, _ = case(tokens, columns, dtype)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy(
            logits.requires_grad_(),
            target,
            token_weight=weight,
            label_smoothing=0.1,
            z_loss=0.1,
            reduction="none",
        )
    assert sum(t.data_ptr() == logits.data_ptr() for t in kept) == 1
    others = [t for t in kept if t.data_ptr() != logits.data_ptr()]
    assert sum(t.numel() for t in others) <= 4 * tokens


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_compiles_into_one_graph(in_place, options):
    logits, target, _, _ = case(6, 33, torch.float32)
    weight = torch.randn(33, 33)

    def step(hidden, target):
        return cross_entropy(
            hidden @ weight, target, grad_in_place=in_place, **options, reduction="none"
        ).sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        hidden = logits.clone().requires_grad_()
        loss = function(hidden, target)
        results.append((loss.detach(), *torch.autograd.grad(loss, hidden)))
    assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.full
def test_compiles_with_inductor():
    logits, target, _, _ = case(6, 33, torch.float32)
    compiled = torch.compile(
        lambda x: cross_entropy(x * 2, target, grad_in_place=True, reduction="none").sum(), fullgraph=True
    )
    results = []
    for function in (compiled, lambda x: cross_entropy(x * 2, target, reduction="none").sum()):
        x = logits.clone().requires_grad_()
        results.append(torch.autograd.grad(function(x), x)[0])
    assert_close(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [False, True])
def test_autocast_changes_nothing(dtype, known):
    """Loss and gradient are computed in float32 from whatever comes, so that there is nothing to cast."""
    logits, target, _, grad_loss = case(9, 65, dtype)
    options = {"loss_grad": grad_loss} if known else {}
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(loss_and_grad(per_token, logits.clone(), target, grad_loss, **options))
    assert results[0][0].dtype == torch.float32 and results[0][1].dtype == dtype
    assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_target_outside_the_vocabulary(wrong):
    logits, target, _, grad_loss = case(4, 12)
    target = target.clamp(max=9)
    target[2] = wrong
    with pytest.raises(ValueError, match=rf"cross_entropy.*{wrong}.*10"):
        cross_entropy(logits, target, vocab_size=10, reduction="none")
    stats = torch.ops.fastmp.cross_entropy_stats(logits, target, 0, 10, False)
    loss, merged = torch.ops.fastmp.cross_entropy_merge(stats[None], target, None, 10, -100, 0.0, 0.0)
    grad = torch.ops.fastmp.cross_entropy_grad(logits, target, merged, grad_loss, None, 0, 10, -100, 0.0, 0.0)
    assert loss.isnan().tolist() == [False, False, True, False] and merged.isfinite().all()
    assert grad[2, :10].isnan().all() and grad[:, 10:].count_nonzero() == 0
    assert grad[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(5, dtype=torch.int64)}, r"\(4, 6\).*\(5,\)"),
        ({"target": torch.zeros(4, dtype=torch.int32)}, "int64.*int32"),
        ({"logits": torch.zeros(4, 6, dtype=torch.int64)}, "float.*|int64"),
        ({"label_smoothing": 1.5}, "label_smoothing.*1.5"),
        ({"z_loss": -1.0}, "z_loss.*-1"),
        ({"label_smoothing": 1.5, "loss_grad": torch.ones(4)}, "label_smoothing.*1.5"),
        ({"z_loss": -1.0, "loss_grad": torch.ones(4)}, "z_loss.*-1"),
        ({"vocab_size": 7}, "vocab_size 7.*6"),
        ({"vocab_size": 0}, "vocab_size.*0"),
        ({"token_weight": torch.ones(3)}, r"\(4,\).*\(3,\)"),
        ({"token_weight": torch.ones(4, requires_grad=True)}, "token_weight.*gradient"),
        ({"logits": torch.zeros(1, 6).expand(4, 6), "grad_in_place": True}, "overlap.*|strides"),
    ],
)
def test_bad_arguments_name_the_op_and_both_values(change, message):
    arguments = {"logits": torch.zeros(4, 6), "target": torch.zeros(4, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=f"cross_entropy.*({message})"):
        cross_entropy(arguments.pop("logits"), arguments.pop("target"), **arguments, reduction="none")


def test_statistics_of_another_shape_are_refused():
    logits, target, _, _ = case(4, 6, torch.float32)
    stats = torch.ops.fastmp.cross_entropy_stats(logits, target, 0, 6, False)
    for wrong in (stats, stats[None, :3], stats[None].double()):
        with pytest.raises(ValueError, match=r"cross_entropy: stats must be torch.float32 \(P, 4, 3\)"):
            cross_entropy_from_stats(logits, target, wrong, vocab_start=0, vocab_size=6)
    with pytest.raises(ValueError, match=r"\(P, 4, 5\)"):
        cross_entropy_from_stats(
            logits, target, stats[None], vocab_start=0, vocab_size=6, label_smoothing=0.1
        )


def test_a_known_gradient_does_not_hide_bad_options():
    """Where gradients are recorded, loss and gradient come from an op of their own."""
    logits, target, _, grad_loss = case(4, 6)
    for name, wrong in (("label_smoothing", 1.5), ("label_smoothing", -0.1), ("z_loss", -1.0)):
        with pytest.raises(ValueError, match=f"cross_entropy: {name} .*{wrong}"):
            known = {"loss_grad": grad_loss, name: wrong}
            cross_entropy(logits.requires_grad_() * 1, target, **known, reduction="none")


@pytest.mark.parametrize("options", [(5, 1.5, 0.0), (5, -0.1, 0.0), (0, 0.1, 0.0), (5, 0.1, -1.0)])
def test_raw_ops_refuse_bad_options_on_every_device(options):
    size, smoothing, z_loss = options
    logits, target, _, row = case(4, 6)
    merged, rest = torch.ones(4, 2, dtype=torch.float64), (-100, smoothing, z_loss)
    calls = {
        "cross_entropy_merge": (merged.new_zeros(2, 4, 5), target, None, size, *rest),
        "cross_entropy_grad": (logits, target, merged, row, None, 0, size, *rest),
        "cross_entropy_grad_": (logits, target, merged, row, None, 0, size, *rest),
        "cross_entropy_loss_grad_": (logits, target, row, None, size, *rest),
        "cross_entropy": (logits, target, None, None, 0, size, *rest, False),
    }
    for device in ("cpu", "meta"):
        for op, arguments in calls.items():
            given = (a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments)
            with pytest.raises(
                (ValueError, RuntimeError), match=f"^{op}: expected .*(smoothing|size|z_loss)"
            ):
                getattr(torch.ops.fastmp, op)(*given)


@pytest.mark.parametrize("known", [False, True])
def test_logits_without_memory_are_named(known):
    logits, target, _, grad_loss = case(4, 6)
    logits.requires_grad_()
    rows = logits * 1
    rows.untyped_storage().resize_(0)
    options = {"loss_grad": grad_loss} if known else {}
    with pytest.raises(ValueError, match="expected memory for all elements of logits "):
        cross_entropy(rows, target, reduction="none", **options)
