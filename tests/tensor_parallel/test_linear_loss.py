"""Linear + cross-entropy over a sharded vocabulary: equal to its two halves, and what it communicates."""

from __future__ import annotations

import itertools

import loss_tools
import pytest
import torch
import torch.distributed as dist
from loss_tools import OPTIONS
from marks import full
from rank_cases import in_turn

from fastmp.optim.grad_buffers import GradBuffer
from fastmp.tensor_parallel.embedding import VocabParallelEmbedding
from fastmp.tensor_parallel.linear import parallel_logits
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_cross_entropy
from fastmp.tensor_parallel.loss import vocab_parallel_cross_entropy
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

S, B, H, V = 8, 5, 12, 24
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def problem(options, dtype=torch.float64):
    """Hidden (S, B, H), weight (V, H), and all else as in `loss_tools.problem`."""
    return loss_tools.problem([(S, B, H), (V, H)], options, V, dtype)


def leaves(hidden, weight, rank, tp, sp):
    """This rank's parts, as leaves."""
    hidden = hidden.chunk(tp)[rank] if sp else hidden
    return hidden.clone().requires_grad_(), weight.chunk(tp)[rank].clone().requires_grad_()


def run(loss_of, x, weight, grad_loss):
    """Loss, gradients, and the collectives of forward and backward."""
    with count_collectives() as forward:
        loss = loss_of(x, weight)
    with count_collectives() as backward:
        grads = torch.autograd.grad(loss, (x, weight), grad_loss)
    return loss.detach(), *grads, forward.calls, backward.calls


def both(place, options, target, **only_fused):
    """The loss by its two halves, and fused, as functions of hidden and weight."""

    def halves(x, weight):
        logits = parallel_logits(x, weight, **place)
        return vocab_parallel_cross_entropy(logits, target, group=place["group"], **options)

    def fused(x, weight):
        return vocab_parallel_linear_cross_entropy(x, weight, target, **place, **options, **only_fused)

    return halves, fused


def check_halves(rank, tp, sp):
    """The losses of all variants, which must be equal on all ranks."""
    place = {"group": dist.group.WORLD if tp > 1 else None, "sequence_parallel": sp}
    losses = []
    for name, chunk, known in itertools.product(OPTIONS, (S * B, 7), (False, True)):
        hidden, weight, target, grad_loss, options = problem(OPTIONS[name])
        upstream = {"loss_grad": grad_loss} if known else {}
        workspace = chunk * V // tp * 8 * (1 + (known and tp > 1))  # two chunks are in flight then
        halves, fused = both(place, options, target, **upstream, workspace=workspace)
        expected = run(halves, *leaves(hidden, weight, rank, tp, sp), grad_loss)
        actual = run(fused, *leaves(hidden, weight, rank, tp, sp), grad_loss)
        for ours, theirs in zip(actual[:3], expected[:3], strict=True):
            text = f"{name}, chunks of {chunk}, {list(upstream)}"
            torch.testing.assert_close(ours, theirs, msg=lambda m, text=text: f"{text}: {m}", **CLOSE)
        if tp > 1:
            check_calls(tp, sp, known, chunk, 5 if options.get("label_smoothing") else 3, *actual[3:])
        else:
            assert actual[3:] == ([], [])
        losses.append(actual[0].tolist())
    return losses


def check_calls(tp, sp, known, chunk, numbers, forward, backward):
    """Statistics are gathered once, or once a chunk with loss_grad; the gradient of hidden is summed once."""
    gathered = [("all_gather", [(S * B, H), (S * B // tp, H)])] if sp else []
    summed = [("reduce_scatter", [(S * B // tp, H), (S * B, H)]) if sp else ("all_reduce", [(S * B, H)])]
    sizes = [min(chunk, S * B - start) for start in range(0, S * B, chunk)] if known else [S * B]
    stats = [("all_gather", [(tp, n, numbers), (1, n, numbers)]) for n in sizes]
    if known:
        assert forward == gathered + stats + summed and backward == []
    else:  # hidden is gathered again where the logits are made again
        assert forward == gathered + stats
        assert backward == (gathered if chunk < S * B else []) + summed


@pytest.mark.parametrize("tp", [2, *full([4])])
def test_equals_its_halves(tp):
    results = run_ranks(in_turn, tp, check_halves, [(False,), (True,)])
    assert all(losses == results[0] for losses in results), "the ranks' losses differ in their bits"


def test_alone():
    check_halves(0, 1, sp=False)
    check_halves(0, 1, sp=True)


def check_bias(rank, tp, sp):
    """A bias is sharded as the weight is, and gets the gradient of its own columns."""
    place = {"group": dist.group.WORLD, "sequence_parallel": sp}
    for chunk, known in itertools.product((S * B, 7), (False, True)):
        hidden, weight, target, grad_loss, options = problem(OPTIONS["plain"])
        bias = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        bias = bias.chunk(tp)[rank].clone().requires_grad_()
        x, own = leaves(hidden, weight, rank, tp, sp)
        logits = parallel_logits(x, own, **place) + bias
        expected = vocab_parallel_cross_entropy(logits, target, group=place["group"], **options)
        actual = vocab_parallel_linear_cross_entropy(
            x, own, target, bias=bias, **place, **options, workspace=2 * chunk * V // tp * 8,
            loss_grad=grad_loss if known else None,
        )  # fmt: skip
        torch.testing.assert_close(actual, expected, **CLOSE)
        grads = (torch.autograd.grad(loss, (x, own, bias), grad_loss) for loss in (actual, expected))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("tp, sp", [(2, True), *full([(4, False)])])
def test_a_bias(tp, sp):
    run_ranks(check_bias, tp, sp)


def check_tied(rank, tp, sp):
    """Two microbatches of different scale: lookup and output layer of one table meet in its main gradient."""
    group = dist.group.WORLD
    place = {"group": group, "sequence_parallel": sp}
    for known in (False, True):
        mains = []
        for table_group in (None, group):
            torch.manual_seed(5)
            options = {"group": table_group, "sequence_parallel": sp, "dtype": torch.float64}
            table = VocabParallelEmbedding(V, H, **options)
            GradBuffer(table.named_parameters())
            for scale, seed in ((1.0, 1), (0.25, 2)):
                generator = torch.Generator().manual_seed(seed)
                tokens, target = torch.randint(V, (2, S, B), generator=generator)
                options = {"loss_grad": scale} if known and table_group else {}
                loss = vocab_parallel_linear_cross_entropy(
                    table(tokens).tanh(), table.weight, target, workspace=7 * V * 8,
                    **place | {"group": table_group}, **options,
                )  # fmt: skip
                (loss.sum() * scale).backward()
            assert table.weight.grad is None
            mains.append(table.weight.main_grad)
        torch.testing.assert_close(mains[1], mains[0].chunk(tp)[rank], **CLOSE)


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
def test_main_gradient_of_a_tied_table(sp):
    run_ranks(check_tied, 2, sp)


def check_dtype(rank, tp, dtype):
    """Sums over ranks and chunks are as exact as those of the halves."""
    group = dist.group.WORLD
    hidden, weight, target, grad_loss, options = problem(OPTIONS["everything"], dtype)
    options["token_weight"], grad_loss = options["token_weight"].float(), grad_loss.float()
    parts = leaves(hidden, weight, rank, tp, False)
    loss = vocab_parallel_linear_cross_entropy(
        *parts, target, group=group, loss_grad=grad_loss, **options, workspace=14 * V // tp * dtype.itemsize
    )
    grads = torch.autograd.grad(loss, parts, grad_loss)
    wide = [t.double().requires_grad_() for t in (hidden, weight)]
    options["token_weight"] = options["token_weight"].double()
    truth = vocab_parallel_linear_cross_entropy(*wide, target, group=None, **options)
    dhidden, dweight = torch.autograd.grad(truth, wide, grad_loss.double())
    assert loss.dtype == torch.float32
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(loss.double(), truth, **tolerance)
    for ours, theirs in zip(grads, (dhidden, dweight.chunk(tp)[rank]), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, **tolerance)
    return loss.tolist()


def test_dtypes():
    results = run_ranks(in_turn, 4, check_dtype, [(torch.float32,), (torch.bfloat16,)])
    assert all(loss == results[0] for loss in results)


def check_layouts(rank, tp):
    group = dist.group.WORLD
    hidden, weight, target, grad_loss, _ = problem({})
    x, part = leaves(hidden, weight, rank, tp, False)
    for upstream in ({}, {"loss_grad": grad_loss}):
        _, fused = both({"group": group}, upstream, target)
        expected = run(fused, x, part, grad_loss)
        for arranged in (
            x.transpose(0, 1).contiguous().transpose(0, 1),
            x.transpose(0, 2).contiguous().transpose(0, 2),
            torch.cat([x, x], -1)[..., :H],
        ):
            turned = part.detach().t().contiguous().t().requires_grad_()
            actual = run(fused, arranged.detach().requires_grad_(), turned, grad_loss)
            for ours, theirs in zip(actual[:3], expected[:3], strict=True):
                torch.testing.assert_close(ours, theirs, **CLOSE)
    empty = vocab_parallel_linear_cross_entropy(x[:0], part, target[:0], group=group, loss_grad=1.0)
    empty.sum().backward()
    assert empty.shape == (0, B) and not x.grad.any() and not part.grad.any()


def test_layouts_and_no_tokens():
    run_ranks(check_layouts, 2)


def check_errors(rank, tp):
    group = dist.group.WORLD
    hidden, weight, target = torch.zeros(4, H), torch.zeros(12, H), torch.tensor([1, 2, 3, 4])
    place, fits = {"group": group}, (hidden, weight, target)
    for message, arguments, options in (
        ("expected target of shape (4,) for hidden (4, 12), got (3,)", (hidden, weight, target[:3]), {}),
        ("expected target of shape (8,) for hidden (4, 12), got (4,)", fits, {"sequence_parallel": True}),
        ("vocab_size is 25, but weight has 24 rows in 2 shards", fits, {"vocab_size": 25}),
        ("target 24 is outside the vocabulary of 24", (hidden, weight, target + 20), {}),
        ("expected loss_grad of shape (4,), like target, got (2,)", fits, {"loss_grad": torch.ones(2)}),
    ):
        with pytest.raises(ValueError) as caught:
            vocab_parallel_linear_cross_entropy(*arguments, **place, **options)
        assert f"vocab_parallel_linear_cross_entropy: {message}" in str(caught.value)


def test_errors_name_both_values():
    run_ranks(check_errors, 2)


def check_compiled(rank, tp):
    hidden, weight, target, grad_loss, options = problem(OPTIONS["everything"])
    for sp, known in ((False, False), (True, True)):
        upstream = {"loss_grad": grad_loss} if known else {}
        place = {"group": dist.group.WORLD, "sequence_parallel": sp}
        _, step = both(place, options, target, **upstream, workspace=20 * V // tp * 8)
        parts = leaves(hidden, weight, rank, tp, sp)
        eager = step(*parts)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*parts)
        assert torch.equal(eager, compiled)
        grads = [torch.autograd.grad(loss, parts, grad_loss) for loss in (eager, compiled)]
        for ours, theirs in zip(*grads, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.full
def test_compiles_in_one_graph(warm_compiler):
    run_ranks(check_compiled, 2, timeout=240)


def reduced_losses(rank, tp, sp):
    """A mean and a sum of all tokens, fused or not, are those of one rank, and so are the gradients."""
    hidden, weight, target, _, _ = problem({})
    place = {"group": dist.group.WORLD, "sequence_parallel": sp}
    for reduction in ("mean", "sum"):
        whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = whole[0].flatten(0, 1) @ whole[1].T
        truth = torch.nn.functional.cross_entropy(logits, target.flatten(), reduction=reduction)
        wanted = torch.autograd.grad(truth * 0.3, whole)
        parts = [wanted[0].chunk(tp)[rank] if sp else wanted[0], wanted[1].chunk(tp)[rank]]
        for loss_of in both(place, {"reduction": reduction}, target):
            x, w = leaves(hidden, weight, rank, tp, sp)
            loss = loss_of(x, w)
            grads = torch.autograd.grad(loss * 0.3, (x, w))
            torch.testing.assert_close((loss.detach(), *grads), (truth.detach(), *parts), **CLOSE)


@pytest.mark.parametrize("sp", [False, True])
def test_reduced_losses_of_two_ranks(sp):
    run_ranks(reduced_losses, 2, sp)
