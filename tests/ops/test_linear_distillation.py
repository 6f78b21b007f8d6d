"""Distillation from hidden states: formulas, precision, where gradients go, what is held and multiplied.

That the losses equal plain torch is tested with all functions, in test_functions.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from marks import full
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import extra_bytes
from fastmp.ops import OPS, linear_distillation, linear_topk_distillation
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.testing.ops import DTYPES, check_op, samples

N, H, TEACHER_H, V, K = 22, 12, 7, 40, 5
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
BOTH = pytest.mark.parametrize("topk", (False, True), ids=("hidden states", "top k"))
EACH = pytest.mark.parametrize("divergence", DIVERGENCES)


def problem(topk: bool, dtype: torch.dtype = torch.float64):
    """The loss of a case with its leaves hidden (11, 2, H) and weight (V, H), the teacher, and a mask."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, teacher, teacher_weight = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        for shape in ((11, 2, H), (V, H), (11, 2, TEACHER_H), (V, TEACHER_H))
    )
    mask = torch.rand(11, 2, generator=generator) < 0.7
    given = teacher, teacher_weight
    if topk:
        log_probs, ids = F.linear(*given).log_softmax(-1).topk(K)
        given = ids, log_probs
    call = linear_topk_distillation if topk else linear_distillation
    return call, hidden.requires_grad_(), weight.requires_grad_(), given, mask


IN_FLOAT32 = pytest.param("triton", (torch.float32,), marks=pytest.mark.interpret)
IN_OTHERS = pytest.param(  # whose rounding alone differs; the interpreter truncates bfloat16
    "triton", (torch.float64, torch.float16), marks=[pytest.mark.interpret, pytest.mark.full]
)


@pytest.mark.parametrize(
    ("backend", "dtypes"), [("c++", DTYPES), ("reference", DTYPES), IN_FLOAT32, IN_OTHERS], ids=str
)
@pytest.mark.parametrize("op", ("distillation_sums", "distillation_grad_"))
def test_kernels_are_exact(op, backend, dtypes):
    if backend == "c++" and OPS[op].serving["cpu"] != "c++":
        pytest.skip(OPS[op].reasons["cpu"])
    for result in check_op(op, "cpu", backend=None if backend == "c++" else backend, dtypes=dtypes):
        assert result.ok, result


@pytest.mark.parametrize("backend", ["c++", pytest.param("triton", marks=pytest.mark.interpret)])
def test_divergences_of_close_rows_keep_their_digits(backend):
    """KL of 5e-5 nats, of which differences of log-sum-exps in float32 would leave two digits."""
    for arguments in samples("distillation_sums", device="cpu", dtype=torch.float32):
        if len(arguments[0]) < 5:
            continue
        run = OPS["distillation_sums"].overload
        run = run if backend == "c++" else OPS["distillation_sums"].implementations[backend]
        found = run(*arguments)
        wide = (a.double() if isinstance(a, Tensor) else a for a in arguments)
        want = OPS["distillation_sums"].implementations["reference"](*wide)
        assert want[1].max() < 1e-3 and not found[0].any()
        torch.testing.assert_close(found[1].double(), want[1], rtol=2e-3, atol=1e-12)


@BOTH
@EACH
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("chunks", (1, 4))
def test_reductions_are_those_of_each_token(topk, divergence, reduction, chunks):
    """Also their gradients, which the forward pass computes, scaled by the upstream gradient."""
    call, hidden, weight, teacher, mask = problem(topk)
    options = {"divergence": divergence, "mask": mask, "workspace": -(-N // chunks) * V * 8}
    loss = call(hidden, weight, *teacher, **options, reduction=reduction)
    each = call(hidden, weight, *teacher, **options, reduction="none")
    assert each.shape == mask.shape and not each[~mask].any() and (each[mask] > 0).all()
    want = each.sum() / (mask.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(loss, want, **CLOSE)
    pairs = [torch.autograd.grad(0.3 * out, (hidden, weight), retain_graph=True) for out in (loss, want)]
    torch.testing.assert_close(*pairs, **CLOSE)
    for out in (loss, want):  # once more, and never again without retain_graph
        torch.testing.assert_close(torch.autograd.grad(0.3 * out, (hidden, weight)), pairs[1], **CLOSE)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.backward()


@BOTH
def test_forward_kl_of_a_certain_teacher_is_the_cross_entropy(topk):
    call, hidden, weight, _, _ = problem(topk)
    target = torch.arange(N).view(11, 2)
    if topk:
        teacher = target[..., None], torch.zeros(11, 2, 1).double()
    else:
        teacher = F.one_hot(target, V).double() * 1e4, torch.eye(V).double()
    loss = call(hidden, weight, *teacher)
    want = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, want, **CLOSE)
    pairs = [torch.autograd.grad(out, (hidden, weight)) for out in (loss, want)]
    torch.testing.assert_close(*pairs, **CLOSE)


@EACH
def test_top_k_of_all_tokens_is_the_whole_divergence(divergence):
    """Then no tail is left; with fewer tokens, merging the others makes the divergence smaller."""
    _, hidden, weight, teacher, mask = problem(False)
    options = {"divergence": divergence, "beta": 0.2, "mask": mask, "reduction": "none"}
    whole = linear_distillation(hidden, weight, *teacher, **options)
    previous = torch.zeros_like(whole)
    for k in (1, 3, 10, V - 1, V):
        log_probs, ids = F.linear(*teacher).log_softmax(-1).topk(k)
        loss = linear_topk_distillation(hidden, weight, ids, log_probs, **options)
        assert (loss >= previous - 1e-9).all()
        previous = loss
    torch.testing.assert_close(loss, whole, **CLOSE)
    pairs = [torch.autograd.grad(out.sum(), (hidden, weight)) for out in (loss, whole)]
    torch.testing.assert_close(*pairs, **CLOSE)


@EACH
def test_limits_of_jsd_are_the_two_kl_divergences(divergence):
    """As beta goes to 0 or 1, the divergence over beta or 1 - beta; and JSD is bounded by log 2."""
    call, hidden, weight, teacher, _ = problem(False)
    jsd = lambda beta: call(hidden, weight, *teacher, divergence="jsd", beta=beta, reduction="none")  # noqa: E731
    if divergence == "jsd":
        assert (jsd(0.5) < math.log(2)).all()
        return
    small = 1e-12
    found = jsd(small) / small if divergence == "forward_kl" else jsd(1 - small) / small
    want = call(hidden, weight, *teacher, divergence=divergence, reduction="none")
    torch.testing.assert_close(found, want, rtol=1e-3, atol=0)


@BOTH
@EACH
def test_equal_distributions_have_loss_and_gradient_zero(topk, divergence):
    """In float32, where a difference of log-sum-exps would have either sign."""
    hidden = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = (10 * torch.randn(500, 16, generator=torch.Generator().manual_seed(1))).requires_grad_()
    options = {"divergence": divergence, "reduction": "none", "temperature": 0.7}
    if not topk:
        loss = linear_distillation(hidden, weight, hidden, weight, **options)
        assert not loss.any()
    else:
        logits = F.linear(hidden, weight).detach() / 0.7
        log_probs, ids = logits.log_softmax(-1).topk(K)
        loss = linear_topk_distillation(hidden, weight, ids, log_probs, **options)
        assert (loss >= 0).all() and (loss < 1e-5).all()
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert all(grad.abs().max() < 1e-2 * topk + 1e-30 for grad in grads)


@EACH
@pytest.mark.parametrize("student", (0.0, -90.0, -200.0, -math.inf))
def test_a_peaked_teacher_and_a_student_that_excludes_tokens(divergence, student):
    """Tokens that neither has, that one has; log-probabilities down to -200 in float32."""
    x = torch.tensor([[0.0, student, -3.0, -math.inf]])
    y = torch.tensor([[0.0, -1.0, -100.0, -math.inf]])
    hidden = torch.ones(1, 1, requires_grad=True)
    loss = linear_distillation(
        hidden, x.T.contiguous(), hidden.detach(), y.T.contiguous(), divergence=divergence
    )
    log_p, log_q = x.double().log_softmax(1)[:, :3], y.double().log_softmax(1)[:, :3]
    if divergence == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        terms = [torch.xlogy(w.exp(), w.exp()) - w.exp() * log_m for w in (log_p, log_q)]
        want = sum(terms).sum() / 2
    else:
        a, b = (log_q, log_p) if divergence == "forward_kl" else (log_p, log_q)
        want = torch.where(a == -math.inf, 0, a.exp() * (a - b)).sum()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)


@EACH
def test_a_tail_of_nearly_no_mass(divergence):
    """The student's tail of 1e-11 keeps its digits in float32; a teacher's mass above one is no tail."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 100, generator=generator)
    logits[:, :4] += 30
    ids = torch.arange(4).expand(16, 4)
    log_probs = torch.randn(16, 4, generator=generator).log_softmax(-1) + 3e-7

    def tail_gradient(dtype: torch.dtype) -> Tensor:
        weight = logits.T.to(dtype).contiguous().requires_grad_()
        loss = linear_topk_distillation(
            torch.eye(16, dtype=dtype), weight, ids, log_probs.to(dtype), divergence=divergence
        )
        assert loss.isfinite()
        return torch.autograd.grad(loss, weight)[0][4:]

    want = tail_gradient(torch.float64)
    assert 0 < want.abs().max() < 1e-8 and want.all()
    torch.testing.assert_close(tail_gradient(torch.float32).double(), want, rtol=1e-4, atol=0)


@BOTH
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_ignored_tokens_cost_no_rows_of_a_gemm(topk, reduction):
    """The FLOPs of all GEMMs are those of the tokens that count, however they are told."""
    call, hidden, weight, teacher, mask = problem(topk)
    live = int(mask.sum())
    student, of_teacher = 2 * live * V * H, 0 if topk else 2 * live * V * TEACHER_H
    times = 1 if reduction == "mean" else 2
    for number in (None, live):
        with FlopCounterMode(display=False) as counter:
            options = {"mask": mask, "num_tokens": number, "reduction": reduction, "workspace": 9 * V * 8}
            call(hidden, weight, *teacher, **options).sum().backward()
        counts = counter.get_flop_counts()["Global"]
        gemms = sum(
            n for op, n in counts.items() if "distillation" not in str(op) and "log_probs" not in str(op)
        )
        assert gemms == (times + 2) * student + times * of_teacher


@BOTH
@pytest.mark.parametrize("counted", (False, *full([True])), ids=("mask", "mask and number"))
def test_compiles_with_a_mask_of_any_number_of_tokens(topk, counted):
    """One graph for the first number, one for all others; the forward pass computes the gradients."""
    call, hidden, weight, teacher, mask = problem(topk)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for live in (mask, ~mask, mask | (torch.arange(22).view(11, 2) < 9)):
        number = {"num_tokens": int(live.sum())} if counted else {}
        pair = [f(hidden, weight, *teacher, mask=live, **number) for f in (compiled, call)]
        assert torch.equal(*pair)
        ours, want = (torch.autograd.grad(loss, (hidden, weight)) for loss in pair)
        assert all(map(torch.equal, ours, want))
    assert counter.frame_count <= 2


@BOTH
def test_all_or_no_tokens_ignored(topk):
    call, hidden, weight, teacher, mask = problem(topk)
    everything = call(hidden, weight, *teacher, mask=torch.ones_like(mask))
    torch.testing.assert_close(everything, call(hidden, weight, *teacher), **CLOSE)
    nothing = call(hidden, weight, *teacher, mask=torch.zeros_like(mask), reduction="sum")
    grads = torch.autograd.grad(nothing, (hidden, weight))
    assert nothing == 0 and not any(grad.any() for grad in grads)
    assert call(hidden, weight, *teacher, mask=torch.zeros_like(mask)).isnan()  # as in torch
    empty = call(hidden[:0], weight, *(t if t is teacher[1] and not topk else t[:0] for t in teacher))
    assert empty.isnan() and empty.dim() == 0


@BOTH
def test_ignored_tokens_may_hold_anything(topk):
    call, hidden, weight, teacher, mask = problem(topk)
    want = call(hidden, weight, *teacher, mask=mask)
    hidden = hidden.detach().masked_fill(~mask[..., None], math.nan).requires_grad_()
    first = teacher[0].masked_fill(~mask[..., None], -1 if topk else math.nan)
    loss = call(hidden, weight, first, teacher[1], mask=mask)
    assert torch.equal(loss, want)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert all(grad.isfinite().all() for grad in grads)


@BOTH
@pytest.mark.parametrize("chunks", (1, 4))
def test_main_gradients_are_summed_over_microbatches(topk, chunks):
    call, hidden, weight, teacher, mask = problem(topk)
    plain, ours = (nn.Parameter(weight.detach().clone()) for _ in range(2))
    grads = GradBuffer([("head", ours)])
    for factor, reduction in itertools.product((1.0, 0.25), ("mean", "none")):
        options = {"mask": mask, "workspace": -(-N // chunks) * V * 8, "reduction": reduction}
        for head in (plain, ours):
            (factor * call(hidden * factor, head, *teacher, **options).sum()).backward()
    assert ours.grad is None
    torch.testing.assert_close(ours.main_grad, plain.grad, **CLOSE)
    grads.remove_hooks()


@BOTH
def test_the_teacher_receives_no_gradient(topk):
    call, hidden, weight, teacher, _ = problem(topk)
    teacher = tuple(t.requires_grad_() if t.is_floating_point() else t for t in teacher)
    call(hidden, weight, *teacher).backward()
    assert hidden.grad is not None and all(t.grad is None for t in teacher)


@EACH
def test_training_reaches_the_teacher(divergence):
    """Gradient descent on the logits: with any divergence the optimum is the teacher's distribution."""
    teacher = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0], dtype=torch.float64)[:, None]
    weight, one = torch.zeros(5, 1, dtype=torch.float64, requires_grad=True), torch.ones(1, 1).double()
    for _ in range(300):
        loss = linear_distillation(one, weight, one, teacher, divergence=divergence, temperature=2.0)
        (grad,) = torch.autograd.grad(loss, weight)
        weight.data -= 20 * grad
    torch.testing.assert_close((weight / 2).softmax(0), (teacher / 2).softmax(0), rtol=1e-4, atol=1e-6)


def test_extra_memory_is_a_tenth_of_plain_torch():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1024, 16, generator=generator) for _ in range(2))
    weight, teacher_weight = (torch.randn(20000, 16, generator=generator) for _ in range(2))
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def ours():
        loss = linear_distillation(x, weight, y, teacher_weight, divergence="jsd", workspace=8 << 20)
        return torch.autograd.grad(loss, (x, weight))

    assert extra_bytes(ours, "cpu") < 0.1 * 2 * 1024 * 20000 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"divergence": "kl"}, "divergence"),
        ({"divergence": "jsd", "beta": 1.0}, "beta must lie between 0 and 1, got 1.0"),
        ({"teacher_hidden": torch.zeros(3, 6)}, r"expected teacher_hidden of shape \(4,\) \+ \(H',\)"),
        ({"teacher_hidden": torch.zeros(4, 6).double()}, "hidden is torch.float32 but teacher_hidden is"),
        ({"teacher_weight": torch.zeros(8, 6)}, r"expected teacher_weight of shape \(9, 6\) .* got \(8, 6\)"),
        ({"mask": torch.ones(4)}, "expected a mask of bool, got torch.float32"),
        (
            {"mask": torch.ones(4, 1).bool()},
            r"expected mask of shape \(4,\), one for each token, got \(4, 1\)",
        ),
        ({"mask": torch.ones(4).bool(), "num_tokens": 3}, "num_tokens is 3, but the mask has 4 tokens"),
        ({"num_tokens": 3}, "num_tokens is 3, but there is no mask"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"vocab_size": 10}, "vocab_size is 10, but weight has 9 rows"),
        ({"reduction": "average"}, "reduction"),
    ),
)
def test_mistakes_are_named_with_both_values(change, message):
    given = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(9, 8)}
    given |= {"teacher_hidden": torch.zeros(4, 6), "teacher_weight": torch.zeros(9, 6)}
    with pytest.raises(ValueError, match=f"linear_distillation: .*{message}"):
        linear_distillation(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"teacher_ids": torch.zeros(4, 2).int()}, "expected int64 teacher_ids, got torch.int32"),
        ({"teacher_ids": torch.zeros(4).long()}, r"expected teacher_ids of shape \(4,\) \+ \(k,\)"),
        ({"teacher_log_probs": torch.zeros(4, 3)}, r"expected teacher_log_probs of shape \(4, 2\)"),
        ({"teacher_ids": torch.tensor([[0, 9]] * 4)}, "teacher_ids has 9, outside the vocabulary of 9 ids"),
        ({"teacher_ids": torch.tensor([[1, 1]] * 4)}, "teacher_ids of a token must be distinct"),
        ({"teacher_log_probs": torch.zeros(4, 2)}, "must be natural log-probabilities, .* a mass of 2.0"),
    ),
)
def test_mistakes_about_the_top_k_are_named(change, message):
    given = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(9, 8)}
    given |= {"teacher_ids": torch.tensor([[0, 8]] * 4), "teacher_log_probs": torch.full((4, 2), -1.0)}
    with pytest.raises(ValueError, match=f"linear_topk_distillation: .*{message}"):
        linear_topk_distillation(**{**given, **change})


def test_a_wrong_id_is_nan_where_it_is_not_looked_for():
    """As on a GPU, where looking would make the device wait."""
    found = torch.compile(linear_topk_distillation, fullgraph=True, backend="aot_eager")(
        torch.zeros(2, 3),
        torch.zeros(4, 3),
        torch.tensor([[1], [4]]),
        torch.full((2, 1), -1.0),
        reduction="none",
    )
    assert found.isnan().tolist() == [False, True]
