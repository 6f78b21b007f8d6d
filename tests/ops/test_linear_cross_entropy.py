"""Linear + cross-entropy: both ways to its gradients, where the gradient of the weight goes, what it holds.

That it equals plain torch is tested with all functions, in test_functions.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import extra_bytes
from fastmp.ops import cross_entropy, linear_cross_entropy
from fastmp.ops.chunked_head import chunk_size
from fastmp.ops.linear_cross_entropy import _FEW_LOGITS
from fastmp.optim.grad_buffers import GradBuffer

N, H, V = 22, 12, 40
CHUNKS = {"one chunk": None, "chunks of 4": 4 * V * 8, "a token at a time": 1}
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "padding": {"vocab_size": 33},
    "everything": {"label_smoothing": 0.1, "z_loss": 1e-2, "vocab_size": 33, "ignore_index": 5},
}


def problem(dtype=torch.float64, tokens=(11, 2), ignore_index=-100):
    """Leaves hidden (11, 2, H) and weight (V, H), targets below 33 with some ignored, gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    target = torch.randint(33, tokens, generator=generator)
    target.view(-1)[::7] = ignore_index
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        random(*tokens, H).requires_grad_(),
        random(V, H).requires_grad_(),
        target,
        random(*tokens).to(wide),
    )


def run(loss_of, hidden, weight, grad):
    loss = loss_of(hidden, weight)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", OPTIONS)
def test_both_ways_equal_the_two_ops(name, chunks):
    """Linear and cross_entropy one after the other, to rounding; with the upstream gradient known or not."""
    options = OPTIONS[name]
    hidden, weight, target, grad = problem(ignore_index=options.get("ignore_index", -100))
    if name == "everything":
        options = {**options, "token_weight": grad.abs()}
    expected = run(
        lambda h, w: cross_entropy(F.linear(h, w), target, **options, reduction="none"), hidden, weight, grad
    )
    for upstream in ({}, {"loss_grad": grad}):

        def fused(h, w, upstream=upstream):
            return linear_cross_entropy(
                h, w, target, **options, **upstream, workspace=CHUNKS[chunks], reduction="none"
            )

        for ours, theirs in zip(run(fused, hidden, weight, grad), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("known", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_narrow_dtypes_in_chunks(dtype, known):
    """The weight's gradient over many chunks is as exact as one product: it is summed in float32."""
    hidden, weight, target, grad = problem(dtype, tokens=(500,))
    upstream = {"loss_grad": grad} if known else {}

    def fused(h, w):
        return linear_cross_entropy(
            h, w, target, **upstream, workspace=20 * V * dtype.itemsize, reduction="none"
        )

    ours = run(fused, hidden, weight, grad)
    plain = run(lambda h, w: cross_entropy(F.linear(h, w), target, reduction="none"), hidden, weight, grad)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = run(lambda h, w: cross_entropy(F.linear(h, w), target, reduction="none"), *wide, grad.double())
    for value, peer, want in zip(ours, plain, truth, strict=True):
        assert value.dtype == peer.dtype
        error, yardstick = ((t.double() - want).norm().item() for t in (value, peer))
        assert error <= 1.1 * yardstick


@pytest.mark.parametrize("known", (False, True))
@pytest.mark.parametrize("chunks", ("one chunk", "chunks of 4"))
def test_only_one_gradient_is_wanted(chunks, known):
    hidden, weight, target, grad = problem()
    upstream = {"loss_grad": grad} if known else {}
    both = run(lambda h, w: linear_cross_entropy(h, w, target, reduction="none"), hidden, weight, grad)
    for wanted in (0, 1):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((hidden, weight))]
        loss = linear_cross_entropy(*leaves, target, **upstream, workspace=CHUNKS[chunks], reduction="none")
        loss.backward(grad)
        assert leaves[1 - wanted].grad is None
        torch.testing.assert_close(leaves[wanted].grad, both[1 + wanted], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("known", (False, True))
def test_no_tokens(known):
    hidden, weight, target, grad = problem()
    loss = linear_cross_entropy(
        hidden[:0], weight, target[:0], loss_grad=1.0 if known else None, reduction="none"
    )
    grads = torch.autograd.grad(loss, (hidden, weight), grad[:0])
    assert loss.shape == (0, 2) and not grads[0].any() and not grads[1].any()


class Tied(nn.Module):
    """An embedding that is also the output layer, with something in between that has a gradient too."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(V, H, dtype=dtype)
        self.middle = nn.Linear(H, H, dtype=dtype)

    def forward(self, tokens, target, **options):
        return linear_cross_entropy(
            self.middle(self.table(tokens)), self.table.weight, target, **options, reduction="none"
        )


@pytest.mark.parametrize("known", (False, True), ids=("recomputed", "known"))
@pytest.mark.parametrize("chunks", ("one chunk", "chunks of 4"))
def test_main_gradients_are_summed_over_microbatches(chunks, known):
    """Two microbatches of different scale, a tied table: main_grad is what autograd sums up, both shares."""
    plain, ours = Tied(torch.float64), Tied(torch.float64)
    grads = GradBuffer(ours.named_parameters())
    for scale, seed in ((1.0, 1), (0.25, 2)):
        tokens, target = torch.randint(V, (2, 11), generator=torch.Generator().manual_seed(seed))
        (plain(tokens, target).sum() * scale).backward()
        upstream = {"loss_grad": scale} if known else {}
        (ours(tokens, target, workspace=CHUNKS[chunks], **upstream).sum() * scale).backward()
    for (name, param), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is None
        torch.testing.assert_close(param.main_grad, expected.grad, rtol=1e-12, atol=1e-12, msg=name)
    grads.remove_hooks()
    tokens = torch.arange(9)
    ours(tokens, tokens).sum().backward()
    assert ours.table.weight.grad is not None


def test_an_output_layer_of_its_own_gets_no_gradient_but_the_main_one():
    hidden, weight, target, grad = problem(torch.bfloat16)
    expected = run(lambda h, w: linear_cross_entropy(h, w, target, reduction="none"), hidden, weight, grad)
    for upstream in ({}, {"loss_grad": grad}):
        param = nn.Parameter(weight.detach().clone())
        GradBuffer([("output", param)])
        loss = linear_cross_entropy(hidden, param, target, **upstream, workspace=4 * V * 2, reduction="none")
        made = param.main_grad.any()
        assert made == bool(upstream)
        (dhidden,) = torch.autograd.grad(loss, hidden, grad)
        assert param.main_grad.dtype == torch.float32 and param.grad is None
        assert torch.equal(dhidden, expected[1])
        torch.testing.assert_close(param.main_grad.to(torch.bfloat16), expected[2])


def test_under_autocast_the_gradient_reaches_the_parameter():
    hidden, weight, target, grad = problem(torch.float32)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    expected = run(lambda h, w: linear_cross_entropy(h, w, target, reduction="none"), *narrow, grad)
    param = nn.Parameter(weight.detach().clone())
    GradBuffer([("output", param)])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(
            hidden, param, target, loss_grad=grad, workspace=4 * V * 2, reduction="none"
        )
        loss.backward(grad)
    assert torch.equal(loss, expected[0]) and hidden.grad.dtype == torch.float32
    torch.testing.assert_close(hidden.grad, expected[1].float())
    torch.testing.assert_close(param.main_grad, expected[2].float(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_recomputed_loss_adds_to_main_grad_once(chunks, known):
    """Activation recomputation runs the forward twice, and that of a known gradient adds to main_grad."""
    hidden, weight, target, grad = problem()
    expected = run(lambda h, w: cross_entropy(h @ w.T, target, reduction="none"), hidden, weight, grad)
    param = nn.Parameter(weight.detach())
    param.main_grad = torch.zeros_like(weight)
    options = {"reduction": "none", "loss_grad": grad if known else None, "workspace": CHUNKS[chunks]}
    loss_of = partial(linear_cross_entropy, weight=param, target=target, **options)
    checkpoint(loss_of, hidden, use_reentrant=False).backward(grad)
    torch.testing.assert_close(param.main_grad, expected[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad, expected[1], rtol=1e-12, atol=1e-12)
    assert param.grad is None


@pytest.mark.parametrize("chunks", ("one chunk", "chunks of 4"))
def test_without_gradients_loss_grad_has_no_effect(chunks):
    hidden, weight, target, grad = problem()
    param = nn.Parameter(weight.detach())
    GradBuffer([("output", param)])
    with torch.no_grad():
        loss = linear_cross_entropy(
            hidden, param, target, loss_grad=grad, workspace=CHUNKS[chunks], reduction="none"
        )
    assert not param.main_grad.any() and not loss.requires_grad
    detached = linear_cross_entropy(hidden.detach(), weight.detach(), target, loss_grad=1.0, reduction="none")
    torch.testing.assert_close(detached, loss, rtol=1e-12, atol=1e-12)


def test_the_expected_upstream_gradient():
    """Numbers, tensors, means; an ignored token may be given any gradient."""
    hidden, weight, target, _ = problem()
    loss = linear_cross_entropy(hidden, weight, target, loss_grad=1 / N, reduction="none")
    grads = torch.autograd.grad(loss.mean(), (hidden, weight))
    expected = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, target, reduction="none").mean(), (hidden, weight)
    )
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    live = (target != -100).double()
    loss = linear_cross_entropy(hidden, weight, target, loss_grad=live, reduction="none")
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), weight)[0], N * grads[1])


@pytest.mark.parametrize("tokens", [(11, 2), (22,)])  # in chunks, and the way for few logits
def test_another_upstream_gradient(tokens):
    hidden, weight, target, _ = problem(tokens=tokens)
    loss = linear_cross_entropy(hidden, weight, target, loss_grad=1.0, reduction="none")
    with pytest.raises(RuntimeError, match="other than the loss_grad"):
        (2 * loss).sum().backward()
    with pytest.raises(RuntimeError, match="other than the loss_grad"):
        (loss * torch.nan).sum().backward()
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward"):
        loss.sum().backward()


@pytest.mark.parametrize("known", (False, True))
def test_a_second_derivative_is_refused(known):
    hidden, weight, target, _ = problem()
    loss = linear_cross_entropy(
        hidden, weight, target, loss_grad=1.0 if known else None, reduction="none"
    ).sum()
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.autograd.grad(loss, weight, create_graph=True)


ONCE = {"few": {}, **{name: {"workspace": size} for name, size in (("one", 1 << 20), ("some", 4 * V * 8))}}


@pytest.mark.parametrize("chunks", ONCE)
@pytest.mark.parametrize(
    "options",
    [*({"reduction": name} for name in ("none", "mean", "sum")), {"reduction": "none", "loss_grad": 3.0}],
    ids=lambda o: "-".join(map(str, o.values())),
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_a_second_backward_needs_a_retained_graph_as_in_torch(dtype, options, chunks):
    """In every number of chunks, also the way for few logits; with loss_grad there is one backward."""
    hidden, weight, target, _ = problem(dtype, tokens=(22,))
    loss = linear_cross_entropy(hidden, weight, target, **options, **ONCE[chunks]).sum()
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    if "loss_grad" in options:
        name = "cross_entropy_loss_grad_" if chunks == "few" else "linear_cross_entropy"
        with pytest.raises(RuntimeError, match=rf"^{name}: .*: there is no second backward"):
            torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
        return
    for retained in (True, False):
        again = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=retained)
        for found, expected in zip(again, first, strict=True):
            torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("tokens", (512, 513), ids=("few logits", "many logits"))
def test_a_second_backward_accumulates_at_every_size(tokens, reduction):
    """Each `.grad` is another memory than what the node keeps: a third pass adds to it as well."""
    x, weight, target = leaves_of(tokens, 3, 2048)
    assert (tokens * len(weight) <= _FEW_LOGITS) == (tokens == 512)
    loss = linear_cross_entropy(x, weight, target, reduction=reduction).sum()
    plain = F.cross_entropy(x @ weight.t(), target, reduction=reduction).sum()
    want = torch.autograd.grad(plain, (x, weight))
    for times in (1, 2, 3):
        loss.backward(retain_graph=times < 3)
        for leaf, each in zip((x, weight), want, strict=True):
            torch.testing.assert_close(leaf.grad, times * each, rtol=1e-4, atol=2e-6)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize(
    ("known", "chunks", "products"), ((True, 4, 6), (True, 1, 6), (False, 1, 6), (False, 4, 8))
)
def test_operations(known, chunks, products):
    """6NVH where the logits are made once, 8NVH where they are made again."""
    hidden, weight = torch.randn(16, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    options = {"loss_grad": 1.0 if known else None, "workspace": 16 // chunks * V * 4}
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, torch.arange(16), **options, reduction="none").sum().backward()
    counts = counter.get_flop_counts()["Global"]
    mine = sum(n for op, n in counts.items() if "fastmp.cross_entropy" not in str(op))
    assert mine == products * 16 * V * H


@pytest.mark.parametrize(
    ("tokens", "columns", "itemsize", "size"),
    (
        (4096, 128256, 2, 4096),  # what a GPU has memory for: one chunk
        (8192, 128256, 2, 4096),
        (8192, 16032, 2, 8192),
        (10000, 128256, 2, 3456),
        (4096, 128256, 4, 2048),
        (5, 128256, 2, 5),
        (0, 128256, 2, 0),
        (7, 1 << 40, 2, 1),
    ),
)
def test_chunks_of_a_gpu(tokens, columns, itemsize, size):
    workspace = 1 << 30
    assert chunk_size(tokens, columns, itemsize, workspace) == size
    assert size <= 1 or size * columns * itemsize <= workspace


def test_chunks_fill_the_workspace_evenly():
    for tokens in (1, 2, 100, 1000, 4097, 30_000):
        for most, unit in (
            (1, 1),
            (3, 1),
            (127, 1),
            (128, 16),
            (500, 16),
            (1023, 16),
            (1024, 128),
            (5000, 128),
        ):
            size = chunk_size(tokens, 10, 4, most * 40)
            assert 1 <= size <= most and (size == tokens or size % unit == 0)
            assert -(-tokens // size) <= -(-tokens // (most - most % unit))


def leaves_of(tokens, hidden, vocab):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).requires_grad_()
    return x, weight, torch.randint(vocab, (tokens,), generator=generator)


@pytest.mark.full
@pytest.mark.parametrize("known", (True, False), ids=("known", "recomputed"))
def test_extra_memory_is_a_tenth_of_plain_torch(known):
    """All that is allocated on the way, beside loss and gradients, at the sizes of GPT-2."""
    x, weight, target = leaves_of(2048, 16, 50304)

    def call(loss_of):
        loss = loss_of()
        return loss.detach(), *torch.autograd.grad(loss.sum(), (x, weight))

    ours = extra_bytes(
        lambda: call(
            lambda: linear_cross_entropy(
                x, weight, target, loss_grad=1.0 if known else None, reduction="none"
            )
        ),
        "cpu",
    )
    plain = extra_bytes(
        lambda: call(lambda: F.cross_entropy(F.linear(x, weight), target, reduction="none")), "cpu"
    )
    assert plain > 2 * 2048 * 50304 * 4
    assert ours < 0.1 * plain, (ours, plain)


@pytest.mark.parametrize("chunks", ("one chunk", "chunks of 4"))
def test_what_is_kept_for_the_backward(chunks):
    hidden, weight, target, _ = problem()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, target, workspace=CHUNKS[chunks], reduction="none")
    mine = [t for t in kept if t.data_ptr() not in (hidden.data_ptr(), weight.data_ptr(), target.data_ptr())]
    assert sorted(t.numel() for t in mine) == ([2 * N, N * V] if chunks == "one chunk" else [2 * N])


class TestCompiled:
    @pytest.mark.parametrize("known", (False, True))
    def test_with_main_gradients(self, known):
        hidden, weight, target, grad = problem(torch.float32)
        param = nn.Parameter(weight.detach())
        grads = GradBuffer([("output", param)])

        def step(hidden):
            upstream = {"loss_grad": grad} if known else {}
            return linear_cross_entropy(
                hidden, param, target, **upstream, workspace=4 * V * 4, reduction="none"
            )

        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            grads.zero()
            loss = function(hidden)
            results.append((loss.detach(), *torch.autograd.grad(loss, hidden, grad), param.main_grad.clone()))
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)

    def test_another_upstream_gradient(self):
        hidden, weight, target, grad = problem(torch.float32)
        compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match="other than the loss_grad"):
            compiled(hidden, weight, target, loss_grad=grad, reduction="none").backward(grad + 1)


def test_the_upstream_gradient_is_checked_without_synchronisation():
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, H, device="meta", requires_grad=True) for n in (N, V))
        target = torch.empty(N, dtype=torch.int64, device="meta")
        loss = linear_cross_entropy(
            hidden, weight, target, loss_grad=1.0, workspace=4 * V * 4, reduction="none"
        ).sum()
        loss.backward()  # reading a value would raise: there is none
        assert hidden.grad.shape == (N, H)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"hidden": torch.zeros(4, 7)}, r"hidden \(4, 7\) does not fit weight \(9, 8\)"),
        ({"hidden": torch.zeros(4, 8).int()}, "hidden must have one of the dtypes .*got torch.int32"),
        ({"weight": torch.zeros(9, 8).double()}, "hidden is torch.float32 but weight is torch.float64"),
        ({"weight": torch.zeros(9)}, r"weight must be \(V, H\), got shape \(9,\)"),
        ({"weight": torch.zeros(9, 8, device="meta")}, "hidden is on cpu but weight is on meta"),
        (
            {"target": torch.zeros(3).long()},
            r"expected target of shape \(4,\) for hidden \(4, 8\), got \(3,\)",
        ),
        ({"target": torch.zeros(4).int()}, "expected int64 target, got torch.int32"),
        ({"target": torch.tensor([0, 1, 9, 2])}, "target 9 is outside the vocabulary of 9 ids"),
        ({"target": torch.tensor([0, 1, -1, 2])}, "target -1 is outside .* not ignore_index -100"),
        ({"target": torch.tensor([0, 8, 1, 2]), "vocab_size": 8}, "target 8 is outside the vocabulary of 8"),
        ({"vocab_size": 10}, "vocab_size is 10, but weight has 9 rows"),
        ({"vocab_size": 0}, "vocab_size is 0, but weight has 9 rows"),
        ({"label_smoothing": 1.5}, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        ({"z_loss": -1.0}, "z_loss must not be negative, got -1.0"),
        ({"token_weight": torch.ones(3)}, r"expected token_weight of shape \(4,\), like target, got \(3,\)"),
        ({"token_weight": torch.ones(4, requires_grad=True)}, "token_weight requires a gradient"),
        ({"loss_grad": torch.ones(2, 2)}, r"expected loss_grad of shape \(4,\), like target, got \(2, 2\)"),
        ({"workspace": -1}, "workspace must not be negative, got -1"),
    ),
)
def test_mistakes_are_named_with_both_values(change, message):
    arguments = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(9, 8), "target": torch.zeros(4).long()}
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {message}"):
        linear_cross_entropy(**{**arguments, **change}, reduction="none")


BAD_UPSTREAM = [float("nan"), float("inf"), 1e300, 10**400, torch.ones(3), torch.ones(4, requires_grad=True)]


@pytest.mark.parametrize("workspace", [None, 1 << 20], ids=["few logits", "chunks"])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "loss_grad", BAD_UPSTREAM, ids=["nan", "inf", "1e300", "10^400", "shape", "gradient"]
)
def test_a_wrong_upstream_gradient_is_named_at_every_size(loss_grad, recorded, workspace):
    hidden, weight = (torch.zeros(rows, 8, requires_grad=recorded) for rows in (4, 9))
    with pytest.raises(ValueError, match=r"linear_cross_entropy: (expected )?loss_grad "):
        linear_cross_entropy(
            hidden,
            weight,
            torch.zeros(4).long(),
            reduction="none",
            loss_grad=loss_grad,
            workspace=workspace,
        )


def test_an_error_of_the_caller_passes_through_few_logits():
    """It is raised as it is, and what raised it is not called again."""
    calls = []

    def pack(tensor):
        calls.append(tensor)
        raise RuntimeError("no room")

    hidden, weight = (torch.zeros(rows, 8, requires_grad=True) for rows in (4, 9))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with pytest.raises(RuntimeError, match=r"^no room$"):
            linear_cross_entropy(hidden, weight, torch.zeros(4).long())
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(0,), (9,), (8, 9)], ids=str)
def test_a_main_gradient_has_the_shape_of_its_weight(shape):
    """A `main_grad` of no elements would lose the gradient without a word."""
    weight = torch.nn.Parameter(torch.ones(9, 8))
    weight.main_grad = torch.zeros(shape)
    with pytest.raises(
        ValueError, match=r"expected main_grad of shape \(9, 8\) for weight of shape \(9, 8\)"
    ):
        linear_cross_entropy(torch.zeros(4, 8), weight, torch.zeros(4).long(), reduction="none")
