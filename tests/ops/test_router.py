"""Choices of the router, ties and groups, against published routers on the same logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastmp.ops import OPS, router, router_triton, topk_router
from fastmp.ops.core.rowwise import strip_shape

EXPERTS, GROUPS = 32, 8


def _logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Routers of `transformers` in plain torch, down to what each returns.


def mixtral(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    probs, indices = logits.softmax(-1).topk(k, -1)
    return indices, probs / probs.sum(-1, keepdim=True)


def qwen3(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    probs, indices = logits.softmax(-1).topk(k, -1)
    return indices, probs / probs.sum(-1, keepdim=True) if normalize else probs


def gpt_oss(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, indices = logits.topk(k, -1)
    return indices, best.softmax(-1)


def deepseek_v2(logits: Tensor, k: int, groups: int, opened: int, scale: float) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    best = scores.view(len(scores), groups, -1).amax(-1).topk(opened, -1).indices
    mask = torch.zeros(len(scores), groups).scatter(1, best, 1.0)
    mask = mask.repeat_interleave(scores.shape[1] // groups, 1).bool()
    probs, indices = scores.masked_fill(~mask, 0.0).topk(k, -1)
    return indices, probs * scale


def deepseek_v3(
    logits: Tensor, bias: Tensor, k: int, groups: int, opened: int, scale: float
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    rated = choice.view(len(scores), groups, -1).topk(2, -1).values.sum(-1)
    mask = torch.zeros_like(rated).scatter(1, rated.topk(opened, -1).indices, 1.0)
    mask = mask.repeat_interleave(scores.shape[1] // groups, 1).bool()
    indices = choice.masked_fill(~mask, -math.inf).topk(k, -1).indices
    probs = scores.gather(1, indices)
    return indices, probs / (probs.sum(-1, keepdim=True) + 1e-20) * scale


def megatron_sqrtsoftplus(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.softplus(logits).sqrt()
    indices = (scores + bias).topk(k, -1).indices
    probs = scores.gather(1, indices)
    return indices, probs / (probs.sum(-1, keepdim=True) + 1e-20)


BIAS = _logits(EXPERTS, seed=1) / 4
PUBLISHED = {
    "Mixtral": (lambda x: mixtral(x, 2), 2, {"normalize": True}),
    "Qwen3": (lambda x: qwen3(x, 8, True), 8, {"normalize": True}),
    "Qwen2": (lambda x: qwen3(x, 4, False), 4, {}),
    "gpt-oss": (lambda x: gpt_oss(x, 4), 4, {"pre_softmax": False}),
    "DeepSeek-V2": (
        lambda x: deepseek_v2(x, 6, GROUPS, 3, 16.0),
        6,
        {"num_groups": GROUPS, "group_topk": 3, "scale": 16.0},
    ),
    "DeepSeek-V3": (
        lambda x: deepseek_v3(x, BIAS, 8, GROUPS, 4, 2.5),
        8,
        {
            "score": "sigmoid",
            "expert_bias": BIAS,
            "num_groups": GROUPS,
            "group_topk": 4,
            "normalize": True,
            "scale": 2.5,
        },
    ),
    "Megatron-core": (
        lambda x: megatron_sqrtsoftplus(x, BIAS, 6),
        6,
        {"score": "sqrtsoftplus", "expert_bias": BIAS, "normalize": True},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_routes_as_published_models_do(name):
    """Experts in the same order, probabilities, and their gradient."""
    published, k, options = PUBLISHED[name]
    logits = _logits(200, EXPERTS).requires_grad_()
    out = topk_router(logits, k, **options)
    indices, probs = published(logits)
    assert torch.equal(out.indices.long(), indices)
    torch.testing.assert_close(out.probs, probs, rtol=1e-12, atol=1e-12)
    grad = _logits(200, k, seed=2)
    ours, theirs = (torch.autograd.grad(p, logits, grad)[0] for p in (out.probs, probs))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def switch_loss(logits: Tensor, k: int) -> Tensor:
    """The load balancing loss of transformers' Mixtral, E * sum of (load / T) * (mean score)."""
    scores = logits.softmax(-1)
    mask = torch.nn.functional.one_hot(scores.topk(k, -1).indices, logits.shape[-1]).double()
    return (mask.mean(0) * scores.mean(0)[None]).sum() * logits.shape[-1]


def test_sums_make_the_balancing_loss():
    logits = _logits(300, EXPERTS).requires_grad_()
    out = topk_router(logits, 4)
    ours = EXPERTS * (out.counts * out.score_sums).sum() / 300**2
    theirs = switch_loss(logits, 4)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-14)
    assert out.counts.sum() == 4 * 300 and not out.counts.requires_grad


def balance_loss(logits: Tensor, k: int, score: str, normalize: bool = True) -> Tensor:
    """The balancing loss from the op's sums."""
    out = topk_router(logits, k, score=score, normalize=normalize)
    return logits.shape[-1] * (out.balance_counts * out.score_sums).sum() / len(logits) ** 2


def share_of(logits: Tensor, score: str) -> Tensor:
    """Shares of a token's scores, by pairwise ratios: no sum of scores that could underflow in float64."""
    log = -torch.logaddexp(-logits, logits * 0)  # of sigmoid
    if score == "sqrtsoftplus":
        log = torch.log1p(torch.exp(logits)).log() / 2
    return (log[:, None, :] - log[:, :, None]).exp().sum(-1).reciprocal()


UNEVEN = torch.tensor([3.0, 2.0, 0.5, 0.25, 0.0, -0.25, -0.5, -1.0], dtype=torch.float64)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("level", [2.0, -38.5, -41.5, -45.0, -60.0, -100.0, -300.0])
def test_low_logits_do_not_hide_a_balancing_loss(level, score, dtype):
    """Loss and gradient of elementwise scores are those of float64 formulas wherever all logits lie."""
    logits = (level + UNEVEN + torch.linspace(-0.2, 0.2, 30, dtype=torch.float64)[:, None]).to(dtype)
    logits.requires_grad_()
    exact = logits.detach().double().requires_grad_()
    theirs = 8 * (torch.tensor([30, 30, 0, 0, 0, 0, 0, 0]) * share_of(exact, score).sum(0)).sum() / 30**2
    ours = balance_loss(logits, 2, score)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=0)
    grads = [torch.autograd.grad(loss, x)[0].double() for loss, x in ((ours, logits), (theirs, exact))]
    torch.testing.assert_close(*grads, rtol=100 * tolerance, atol=tolerance * grads[1].abs().max().item())


def test_pushing_all_logits_down_does_not_lower_a_balancing_loss():
    """Two of eight experts take every token: the loss is 3.47 at any level, and has no slope along it."""
    spread = torch.tensor([19.6415] * 2 + [1.0] * 6, dtype=torch.float64).log()  # 8 * 39.283 / 45.283 / 2
    for level in (-45.0, -60.0, -100.0):
        shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
        loss = balance_loss(level + spread.expand(100, 8) + shift, 2, "sigmoid") / 2
        loss.backward()
        assert loss.item() == pytest.approx(3.47, abs=1e-4) and abs(shift.grad.item()) < 1e-10


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_masked_experts_have_no_share(score, dtype):
    """A logit of -inf has a share and a gradient of 0, also where others are low or -inf too."""
    logits = torch.tensor([[-math.inf, 0.0, 1.0], [-math.inf, -90.0, -91.0], [-math.inf] * 3], dtype=dtype)
    logits.requires_grad_()
    out = topk_router(logits, 1, score=score)
    torch.testing.assert_close(out.score_sums.sum(), torch.tensor(2.0, dtype=dtype))
    assert out.score_sums[0] == 0
    out.score_sums[1].backward()
    assert logits.grad[:, 0].eq(0).all() and logits.grad[2].eq(0).all() and logits.grad[:2, 1].gt(0).all()


def _counted(chosen: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(chosen, EXPERTS).sum((0, -2)).int()


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3"])
@pytest.mark.parametrize("shape", [(200,), (50, 4)], ids=["tokens", "sequences"])
def test_balance_counts_know_neither_bias_nor_groups(name, shape):
    """Megatron-LM's compute_routing_scores_for_aux_loss and DeepSeek-V3's sequence-wise loss do so."""
    _, k, options = PUBLISHED[name]
    logits = _logits(*shape, EXPERTS)
    out = topk_router(logits, k, **options)
    scores = logits.sigmoid() if name == "DeepSeek-V3" else logits.softmax(-1)
    assert torch.equal(out.balance_counts, _counted(scores.topk(k, -1).indices))
    assert torch.equal(out.counts, _counted(out.indices.long()))
    assert not torch.equal(out.counts, out.balance_counts)
    assert topk_router(logits, k, balance=False, **options).balance_counts is None


def test_balance_counts_are_the_counts_without_bias_and_groups():
    out = topk_router(_logits(20, EXPERTS), 4, num_groups=GROUPS)
    assert out.balance_counts is out.counts


SCORES = (
    {"score": "softmax"},
    {"score": "softmax", "normalize": True},
    {"score": "softmax", "pre_softmax": False},
    {"score": "sigmoid"},
    {"score": "sigmoid", "normalize": True},
    {"score": "sqrtsoftplus", "normalize": True},
)
EVERY_SCORE = pytest.mark.parametrize("options", SCORES, ids=lambda o: "-".join(map(str, o.values())))


@EVERY_SCORE
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_ties_go_to_the_lower_expert(options, dtype):
    for value in (0.0, -math.inf, 7.0):
        out = topk_router(torch.full((3, 70), value, dtype=dtype), 5, **options)
        assert torch.equal(out.indices, torch.arange(5).int().expand(3, 5))
    logits = torch.tensor([[1, 2, 1, 2, 1, 2, 0, -0.0]], dtype=dtype)
    out = topk_router(logits, 8, **options)
    assert out.indices.tolist() == [[1, 3, 5, 0, 2, 4, 6, 7]]
    assert topk_router(-logits, 8, **options).indices.tolist() == [[6, 7, 0, 2, 4, 1, 3, 5]]


@EVERY_SCORE
@pytest.mark.parametrize("k", (1, 50, 130))
def test_every_pattern_of_ties(options, k):
    """A stable sort says which come first; of 200 experts most are equal, on about a dozen levels."""
    logits = (_logits(400, 200) * 2).round()
    out = topk_router(logits, k, **options)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(out.indices.long(), order[:, :k])
    out = topk_router(logits, k, **options, num_groups=8, group_topk=6)
    if options["score"] == "softmax":
        best = logits.view(400, 8, 25).amax(-1).sort(dim=-1, descending=True, stable=True).indices[:, :6]
        among = (order[..., None] // 25 == best[:, None]).any(-1)
        assert out.indices.tolist() == [o[a][:k].tolist() for o, a in zip(order, among, strict=True)]
    assert (out.indices.sort().values.diff() > 0).all()


def test_ties_of_groups_go_to_the_lower_group():
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        out = topk_router(torch.zeros(2, 12), 3, score=score, num_groups=4, group_topk=2)
        assert out.indices.tolist() == [[0, 1, 2]] * 2
        logits = torch.zeros(1, 12)
        logits[0, 9:] = 1.0  # the last group, then the first of the others
        out = topk_router(logits, 5, score=score, num_groups=4, group_topk=2)
        assert out.indices.tolist() == [[9, 10, 11, 0, 1]]


def test_scores_that_rounding_makes_equal_are_told_apart():
    """exp(-200) is 0 and sigmoid(40) is 1 in float32, but the logits differ."""
    out = topk_router(torch.tensor([[0.0, -300.0, -200.0]]), 2)
    assert out.indices.tolist() == [[0, 2]] and out.probs.tolist() == [[1.0, 0.0]]
    out = topk_router(torch.tensor([[40.0, 50.0, 60.0]]), 2, score="sigmoid")
    assert out.indices.tolist() == [[2, 1]] and out.probs.tolist() == [[1.0, 1.0]]
    logits = torch.tensor([[-300.0, -200.0, -250.0]], requires_grad=True)
    out = topk_router(logits, 2, score="sqrtsoftplus", normalize=True)
    assert out.indices.tolist() == [[1, 2]] and out.probs.tolist() == [[0.0, 0.0]]
    out.probs.sum().backward()
    assert logits.grad.tolist() == [[0.0] * 3]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_sqrtsoftplus_is_accurate_on_both_sides(dtype):
    """Values and gradients to a few units in the last place, where 1 + e^x rounds to 1 or to e^x."""
    logits = torch.linspace(-80, 80, 2 * 321).to(dtype).view(2, -1).requires_grad_()
    out = topk_router(logits, 321, score="sqrtsoftplus")
    exact = logits.detach().double().clone().requires_grad_()
    scores = torch.logaddexp(exact, exact * 0).sqrt()
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(out.probs.double(), scores.flip(-1), **tolerance)
    (got,) = torch.autograd.grad(out.probs.sum(), logits)
    (wanted,) = torch.autograd.grad(scores.sum(), exact)
    torch.testing.assert_close(got.double(), wanted, **tolerance)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "logits"])
@pytest.mark.parametrize(("k", "opened"), [(8, 2), (6, 4), (8, 4), (3, 3)])
def test_groups_by_the_rule_of_megatron(k, opened, score, biased):
    """A group is as good as its k // opened best together; values, sums and gradients.

    With a group a node it is the node-limited routing of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    logits = _logits(50, EXPERTS).double().requires_grad_()
    bias = torch.randn(EXPERTS, dtype=torch.float64) / 8 if biased else None
    options = {"score": "softmax", "pre_softmax": False} if score == "logits" else {"score": score}
    out = topk_router(
        logits, k, **options, num_groups=GROUPS, group_topk=opened, group_score="megatron", expert_bias=bias
    )
    with torch.no_grad():
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "logits": logits}[score]
        choice = scores if bias is None else scores + bias
        rated = choice.view(len(choice), GROUPS, -1).topk(k // opened).values.sum(-1)
        opens = torch.zeros_like(rated).scatter(1, rated.topk(opened).indices, 1.0)
        closed = opens.repeat_interleave(EXPERTS // GROUPS, 1) == 0
        expected = choice.masked_fill(closed, -torch.inf).topk(k).indices
    assert torch.equal(out.indices.long(), expected)
    plain = topk_router(logits, k, **options)
    torch.testing.assert_close(out.score_sums, plain.score_sums)
    torch.testing.assert_close(out.z_sum, plain.z_sum)
    assert torch.equal(out.balance_counts, plain.balance_counts)
    assert torch.equal(out.counts, torch.bincount(expected.flatten(), minlength=EXPERTS).int())
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(score)
    if score == "logits":
        probs = logits.gather(1, expected).softmax(-1)
    else:
        probs = scores.gather(1, expected)
    torch.testing.assert_close(out.probs, probs)
    weights = torch.randn(50, k, dtype=torch.float64)
    (got,) = torch.autograd.grad((out.probs * weights).sum() + out.z_sum, logits)
    (wanted,) = torch.autograd.grad((probs * weights).sum() + logits.logsumexp(-1).square().sum(), logits)
    torch.testing.assert_close(got, wanted)


def test_groups_by_the_best_or_by_the_two_best():
    logits = torch.tensor([[3.0, -9, 2, 2, 1, 1]])
    assert topk_router(logits, 2, num_groups=3, group_topk=1).indices.tolist() == [[0, 1]]
    out = topk_router(logits, 2, score="sigmoid", num_groups=3, group_topk=1)
    assert out.indices.tolist() == [[2, 3]]
    # one expert a group: group-limited is the plain choice
    limited = topk_router(logits, 2, score="sigmoid", num_groups=6, group_topk=2)
    assert limited.indices.tolist() == [[0, 2]]
    # and an expert of a closed group is not chosen even if those of open ones are at -inf
    logits = torch.tensor([[5.0, -math.inf, 4, 4]])
    assert topk_router(logits, 2, num_groups=2, group_topk=1).indices.tolist() == [[0, 1]]


def test_bias_steers_the_choice_only():
    logits = torch.tensor([[0.0, 1.0, 2.0]], requires_grad=True)
    bias = torch.tensor([10.0, 0.0, 0.0], requires_grad=True)
    for options in SCORES:
        out = topk_router(logits, 1, expert_bias=bias, **options)
        assert out.indices.tolist() == [[0]] and out.counts.tolist() == [1, 0, 0]
        plain = topk_router(logits, 3, **options)
        if not options.get("normalize") and options.get("pre_softmax", True):
            torch.testing.assert_close(out.probs, plain.probs[:, 2:])
        torch.testing.assert_close(out.score_sums, plain.score_sums)
        (out.probs.sum() + out.z_sum).backward()
    assert bias.grad is None and logits.grad is not None
    half = topk_router(logits.detach().bfloat16(), 1, expert_bias=bias.bfloat16())
    assert half.indices.tolist() == [[0]]  # any floating dtype


@EVERY_SCORE
def test_no_tokens_and_one_expert(options):
    logits = torch.zeros(0, 4, requires_grad=True)
    out = topk_router(logits, 2, **options)
    assert out.indices.shape == (0, 2) and out.counts.tolist() == [0] * 4
    assert out.score_sums.tolist() == [0.0] * 4 and out.z_sum.item() == 0
    (out.probs.sum() + out.score_sums.sum() + out.z_sum).backward()
    assert logits.grad.shape == (0, 4)
    assert topk_router(torch.zeros(0, 3, 4), 2, **options).counts.shape == (3, 4)
    assert topk_router(torch.zeros(5, 0, 4), 2, **options).counts.shape == (0, 4)
    one = topk_router(torch.ones(5, 1), 1, **options)
    assert one.indices.tolist() == [[0]] * 5 and one.counts.tolist() == [5]


@EVERY_SCORE
@pytest.mark.parametrize("grouped", (False, True))
@pytest.mark.parametrize("biased", (False, True))
def test_nan_is_chosen_first_and_never_out_of_range(options, grouped, biased):
    logits = _logits(6, 16, dtype=torch.float32)
    logits[0, 3], logits[1, :], logits[2, 5:9], logits[3, 0], logits[4, :2] = (
        math.nan,
        math.nan,
        -math.nan,
        math.inf,
        -math.inf,
    )
    logits[2, 1] = math.inf
    options = options | ({"num_groups": 4, "group_topk": 2} if grouped else {})
    if biased:
        options = options | {"expert_bias": torch.zeros(16)}
    out = topk_router(logits, 6, **options)
    assert ((out.indices >= 0) & (out.indices < 16)).all() and out.counts.sum() == 36
    assert all(len(set(row)) == 6 for row in out.indices.tolist())
    assert out.probs[5].isfinite().all() and out.score_sums.isnan().all() and out.z_sum.isnan()
    if not biased or options["score"] in router_triton.ELEMENTWISE:
        assert out.indices[0, 0] == 3 and out.indices[2, :4].tolist() == [5, 6, 7, 8]
    assert out.probs[0].isnan().any()


def test_only_the_wanted_gradients_are_made():
    logits = _logits(9, 8, dtype=torch.float32).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = topk_router(logits, 2)
    assert {t.data_ptr() for t in saved} == {logits.data_ptr(), out.indices.data_ptr()}
    parts = [torch.autograd.grad(o.sum(), logits, retain_graph=True)[0] for o in (out[1], out[3], out[4])]
    (both,) = torch.autograd.grad(out[1].sum() + out[3].sum() + out[4], logits)
    torch.testing.assert_close(sum(parts), both)


def test_autocast_keeps_the_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert topk_router(torch.zeros(2, 3), 1).probs.dtype == torch.float32
        assert topk_router(torch.zeros(2, 3, dtype=torch.bfloat16), 1).probs.dtype == torch.float32
        assert topk_router(torch.zeros(2, 3, dtype=torch.float64), 1).score_sums.dtype == torch.float64


@pytest.mark.parametrize(
    ("shape", "k", "options", "message"),
    [
        ((3, 4), 5, {}, "k must be between 1 and the 4 experts, got 5"),
        ((3, 4), 0, {}, "k must be between 1 and the 4 experts, got 0"),
        ((3, 4), 1, {"num_groups": 3}, "4 experts do not divide into num_groups=3"),
        ((3, 4), 1, {"num_groups": 2, "group_topk": 3}, "between 1 and num_groups=2, got 3"),
        ((3, 4), 3, {"num_groups": 2, "group_topk": 1}, "k=3 experts are not in group_topk=1 groups of 2"),
        ((3, 4), 1, {"score": "relu"}, "got 'relu'"),
        ((3, 4), 1, {"group_score": "mean"}, "got 'mean'"),
        (
            (3, 8),
            1,
            {"num_groups": 4, "group_topk": 2, "group_score": "megatron"},
            "group_score 'megatron' needs k >= group_topk=2, got 1",
        ),
        ((4,), 1, {}, r"\(T, E\) or \(S, B, E\), got shape \(4,\)"),
        (
            (3, 4),
            1,
            {"expert_bias": torch.zeros(3)},
            r"expert_bias of shape \(4,\) for logits of .*, got \(3,\)",
        ),
        ((3, 4), 1, {"expert_bias": torch.zeros(4, device="meta")}, "on cpu but expert_bias is on meta"),
    ],
)
def test_wrong_arguments(shape, k, options, message):
    with pytest.raises(ValueError, match=f"topk_router: .*{message}"):
        topk_router(torch.zeros(shape), k, **options)


def test_wrong_dtypes():
    with pytest.raises(ValueError, match=r"topk_router: logits .* got torch.int32"):
        topk_router(torch.zeros(2, 3).int(), 1)
    with pytest.raises(ValueError, match=r"expert_bias must be floating, got torch.int64"):
        topk_router(torch.zeros(2, 3), 1, expert_bias=torch.zeros(3).long())


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.int64))
@pytest.mark.parametrize("implementation", ("reference", "triton", "registered"))
def test_a_raw_call_takes_no_bias_of_another_dtype_or_size(implementation, dtype):
    """Whatever serves it: C++ where it is built, else the reference."""
    op, logits, options = OPS["topk_router"], torch.randn(4, 8), (2, "softmax", 1, 1, False, 1.0, True)
    run = op.implementations.get(implementation, op.overload)
    name = {torch.float64: "Double", torch.bfloat16: "BFloat16", torch.int64: "Long"}[dtype]
    for bias, got in ((torch.zeros(8, dtype=dtype), f"8 of {name}"), (torch.zeros(7), "7 of Float")):
        with pytest.raises(RuntimeError, match=f"expert_bias must have 8 numbers of Float, got {got}"):
            run(logits, bias, *options)


@pytest.mark.parametrize("itemsize", (4, 8))
@pytest.mark.parametrize("width", (16, 64, 256, 512, 4096, 16384))
@pytest.mark.parametrize("num_tokens", (1, 300, 8192, 1 << 20))
def test_block_shapes(num_tokens, width, itemsize):
    block_m, num_warps = router_triton.block_shape(num_tokens, width, itemsize)
    assert block_m & (block_m - 1) == 0 and num_warps in (8, 16)
    held = block_m * width / (32 * num_warps)
    most = 64 // itemsize if block_m == num_warps else 32 // itemsize
    assert held <= most or (block_m == 1 and width > 16384 // itemsize)
    num_strips, steps = strip_shape(num_tokens, 4, block_m, 1)
    assert num_strips <= 256 and (num_strips - 1) * steps < num_tokens <= num_strips * steps


@pytest.mark.parametrize(
    ("width", "itemsize", "block"),
    [
        (16, 4, (16, 2)),
        (128, 4, (2, 2)),
        (256, 4, (2, 2)),
        (512, 4, (2, 2)),
        (1024, 4, (1, 4)),
        (16384, 4, (1, 16)),
        (128, 8, (2, 2)),
        (512, 8, (1, 4)),
    ],
)
def test_backward_block_shapes(width, itemsize, block):
    assert router_triton.backward_block_shape(width, itemsize) == block


def test_reference_serves_where_nothing_else_does():
    """The op by its reference gives the tensors that the fake promises."""
    for arguments in ((_logits(5, 6), None, 2), (_logits(5, 3, 6), None, 2)):
        options = ("sigmoid", 2, 1, True, 1.0, True)
        real = router.reference(*arguments, *options)
        fake = router._fake(*arguments, *options)
        assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]
        assert all(t.is_contiguous() for t in real)
