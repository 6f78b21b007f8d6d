"""Objectives: plain torch from full logits in float64, on one rank and over a sharded vocabulary; by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from marks import full

from fastmp.objectives import (
    dapo_loss,
    dpo_loss,
    group_advantages,
    grpo_loss,
    gspo_loss,
    kl_estimates,
    kto_loss,
    kto_reference_point,
    linear_objective,
    mismatch_weights,
    orpo_loss,
    sequence_log_probs,
    simpo_loss,
    token_log_probs,
)
from fastmp.testing.ranks import run_ranks

B, S, H, V = 4, 8, 12, 24
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LENGTHS = (5, 7, 0, 3)  # tokens that count; the third sequence has none


def problem():
    """Hidden states (B, S, H), weight (V, H), ids and mask (B, S), and what objectives want besides."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, weight = draw(B, S, H), draw(V, H) / 2
    ids = torch.randint(V, (B, S), generator=generator)
    mask = torch.zeros(B, S, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, 8 - length :] = True
    mask[1, 3] = False  # the answer of a tool, in the middle
    log_probs = plain_log_probs(hidden, weight, ids)
    other = {
        "advantages": torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64),
        "token_advantages": draw(B, S),
        "old": log_probs + 0.3 * draw(B, S),
        "ref": log_probs + 0.5 * draw(B, S),
        "token_weight": draw(B, S).abs(),
    }
    for x in (*other.values(), log_probs):
        if x.shape == mask.shape:
            x[~mask] = math.nan  # never read
    return hidden, weight, ids, mask, other


def plain_log_probs(hidden, weight, ids):
    return (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]


# The formulas, a sequence at a time, from its log-probabilities, those of other policies, and its advantage.


def ratio_terms(ratio, advantage, low, high, delta=math.inf):
    return torch.minimum(ratio.clamp(max=delta) * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def plain_policy(rows, low, high, delta=math.inf, beta=0.0, by_token=False, of_sequence=False):
    terms = []
    for lp, old, ref, advantage, token_weight in rows:
        ratio = (lp - old).mean().exp() if of_sequence else (lp - old).exp()
        term = ratio_terms(ratio, advantage, low, high, delta) * token_weight
        terms.append(term - beta * ((ref - lp).exp() - (ref - lp) - 1))
    return -(torch.cat(terms).mean() if by_token else torch.stack([t.mean() for t in terms]).mean())


def plain_pairs(chosen, rejected, kind, beta, gamma=0.0):
    """Of one pair of (log-probabilities, those of the reference)."""
    if kind == "dpo":
        margin = beta * ((chosen[0] - chosen[1]).sum() - (rejected[0] - rejected[1]).sum())
        return -torch.log(torch.sigmoid(margin))
    good, bad = chosen[0].mean(), rejected[0].mean()
    if kind == "simpo":
        return -torch.log(torch.sigmoid(beta * good - beta * bad - gamma))
    odds = [x.exp() / (1 - x.exp()) for x in (good, bad)]
    return -good - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))


def plain_kto(rows, desirable, z, beta, weights):
    terms = []
    for (lp, ref), good in zip(rows, desirable, strict=True):
        r = (lp - ref).sum()
        value = torch.sigmoid(beta * (r - z)) if good else torch.sigmoid(beta * (z - r))
        terms.append(weights[0 if good else 1] * (1 - value))
    return torch.stack(terms).mean()


def cases(mask, other):
    """(name, objective, its arguments, the plain loss from log-probabilities (B, S))."""

    def rows(lp, advantages="advantages", weighted=False):
        for row in (0, 1, 3):
            m = mask[row]
            advantage = other[advantages][row]
            advantage = advantage[m] if advantage.dim() else advantage
            token_weight = other["token_weight"][row][m] if weighted else torch.ones(())
            yield lp[row][m], other["old"][row][m], other["ref"][row][m], advantage, token_weight

    def of(lp, row):
        return lp[row][mask[row]], other["ref"][row][mask[row]]

    policy = {"advantages": other["advantages"], "old_log_probs": other["old"]}
    ref, good = {"ref_log_probs": other["ref"]}, torch.tensor([True, False, True, True])
    pair = {"dpo": dpo_loss, "simpo": simpo_loss, "orpo": orpo_loss}
    yield "grpo", grpo_loss, policy, lambda lp: plain_policy(rows(lp), 0.2, 0.2)
    everything = {"epsilon_high": 0.3, "delta": 1.4, "beta": 0.04, "token_weight": other["token_weight"]}
    yield (
        "grpo with everything",
        grpo_loss,
        {**policy, **ref, **everything, "advantages": other["token_advantages"]},
        lambda lp: plain_policy(rows(lp, "token_advantages", True), 0.2, 0.3, 1.4, 0.04),
    )
    yield "dapo", dapo_loss, policy, lambda lp: plain_policy(rows(lp), 0.2, 0.28, by_token=True)
    yield (
        "dr grpo",
        grpo_loss,
        {**policy, "normalize": "token", "divisor": B * S},
        lambda lp: plain_policy(rows(lp), 0.2, 0.2, by_token=True) * mask.sum() / (B * S),
    )
    yield (
        "gspo",
        gspo_loss,
        {**policy, **ref, "epsilon_low": 0.05, "epsilon_high": 0.05, "beta": 0.1},
        lambda lp: plain_policy(rows(lp), 0.05, 0.05, beta=0.1, of_sequence=True),
    )
    # the third of four is empty: its pair counts nowhere, and the pair of the second and the fourth is left
    for kind, options in (("dpo", {**ref, "beta": 0.3}), ("simpo", {"gamma": 0.5}), ("orpo", {"beta": 0.2})):
        beta, gamma = options.get("beta", 2.0), options.get("gamma", 0.0)
        yield (
            kind, pair[kind], options,
            lambda lp, kind=kind, b=beta, g=gamma: plain_pairs(of(lp, 1), of(lp, 3), kind, b, g),
        )  # fmt: skip
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.3}
    yield (
        "kto",
        kto_loss,
        {**ref, **weights, "desirable": good, "reference_point": torch.tensor(0.4).double(), "beta": 0.3},
        lambda lp: plain_kto([of(lp, row) for row in (0, 1, 3)], good[[0, 1, 3]], 0.4, 0.3, (1.0, 1.3)),
    )


def check_parity(rank, tp, sp=False):
    hidden, weight, ids, mask, other = problem()
    place = {"group": dist.group.WORLD if tp > 1 else None, "sequence_parallel": sp, "sequence_first": sp}
    losses = []
    for name, objective, arguments, plain in cases(mask, other):
        whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        want = plain(plain_log_probs(*whole, ids) if name else None)
        dhidden, dweight = torch.autograd.grad(want, whole)
        x = hidden.transpose(0, 1).chunk(tp)[rank] if sp else hidden
        leaves = x.clone().requires_grad_(), weight.chunk(tp)[rank].clone().requires_grad_()
        loss, metrics = linear_objective(objective, *leaves, ids, mask, **place, **arguments, workspace=2000)
        found = torch.autograd.grad(loss, leaves)
        dhidden = dhidden.transpose(0, 1).chunk(tp)[rank] if sp else dhidden
        torch.testing.assert_close(loss, want, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(found, (dhidden, dweight.chunk(tp)[rank]), **CLOSE)
        assert all(value.isfinite() and not value.requires_grad for value in metrics.values()), (
            name,
            metrics,
        )
        losses.append(loss.item())
    return losses


def test_equal_plain_torch():
    check_parity(0, 1)


@pytest.mark.parametrize(("tp", "sp"), [(2, True), *full([(2, False), (4, False), (4, True)])])
def test_equal_plain_torch_over_a_sharded_vocabulary(tp, sp):
    results = run_ranks(check_parity, tp, sp)
    assert all(losses == results[0] for losses in results), "the ranks' losses differ in their bits"


def packed(x, mask):
    """Sequences without their padding, which is on the left, and their boundaries."""
    starts = [int(row.int().argmax()) if row.any() else len(row) for row in mask]
    rows = [row[start:] for row, start in zip(x, starts, strict=True)]
    ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return torch.cat(rows), ends.int()


def test_packed_sequences_equal_padded_ones():
    hidden, weight, ids, mask, other = problem()
    log_probs = plain_log_probs(hidden, weight, ids)
    for name, objective, arguments, _ in cases(mask, other):
        padded, flat = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
        like = {
            key: packed(x, mask)[0] if torch.is_tensor(x) and x.shape == mask.shape else x
            for key, x in arguments.items()
        }
        tokens, cu_seqlens = packed(flat, mask)
        want = objective(padded, mask, **arguments)
        found = objective(tokens, packed(mask, mask)[0], **like, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(found, want, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        grads = [torch.autograd.grad(loss, x)[0] for (loss, _), x in ((found, flat), (want, padded))]
        torch.testing.assert_close(*grads, **CLOSE)


def test_nothing_in_the_mask_is_a_loss_of_zero():
    _, _, _, mask, other = problem()
    for name, objective, arguments, _ in cases(mask, other):
        log_probs = torch.full((B, S), math.nan, dtype=torch.float64, requires_grad=True)
        loss, metrics = objective(log_probs, torch.zeros_like(mask), **arguments)
        (grad,) = torch.autograd.grad(loss, log_probs)
        assert loss == 0 and not grad.any(), name
        assert all(value == 0 for value in metrics.values()), (name, metrics)


@pytest.mark.parametrize("gap", (1e3, -1e3, math.inf, -math.inf))
def test_log_ratios_do_not_overflow(gap):
    _, _, _, mask, other = problem()
    for _, objective, arguments, _ in cases(mask, other):
        if "old_log_probs" in arguments:
            log_probs = (other["old"].float() + gap).requires_grad_()
            loss, metrics = objective(log_probs, mask, **arguments)
            (grad,) = torch.autograd.grad(loss, log_probs)
            assert loss.isfinite() and grad.isfinite().all()
            assert all(value.isfinite() for value in metrics.values()), metrics


# Log-probabilities of a token under the policy, and under the sampling or the reference policy.
EXTREMES = {
    "impossible": (-math.inf, -1.0),
    "impossible before": (-1.0, -math.inf),
    "impossible in both": (-math.inf, -math.inf),
    "unlikely": (-1e4, -1.0),
    "unlikely before": (-1.0, -1e4),
    "unlikely in both": (-1e4, -1e4),
    "ratio at the limit": (-1.0, -20.5),
    "large ratio": (-1.0, -19.0),
    "certain": (0.0, -1.0),
    "certain in both": (0.0, 0.0),
    "equal": (-1.5, -1.5),
}


def limited(log_ratio):
    """Log-ratio with a gradient within [-20, 20], a number beyond."""
    value = log_ratio.item()
    return log_ratio if abs(value) <= 20 else torch.tensor(math.copysign(20.0, value)).double()


def exact_policy(lp, old, advantages, low, high, *, by_token=False, of_sequence=False):
    """Return the loss of lists of tokens, term by term."""
    sequences = []
    for row, old_row, advantage in zip(lp, old, advantages, strict=True):
        log_ratios = [x - y for x, y in zip(row, old_row, strict=True)]
        if of_sequence:
            log_ratios = [sum(log_ratios) / len(row)] * len(row)
        ratios = [limited(each).exp() for each in log_ratios]
        terms = [
            advantage * (min(r, 1 + high) if advantage > 0 else max(r, 1 - low) if advantage < 0 else 0.0 * r)
            for r in ratios
        ]
        sequences.append(terms)
    if by_token:
        return -sum(map(sum, sequences)) / sum(map(len, sequences))
    return -sum(sum(terms) / len(terms) for terms in sequences) / len(sequences)


def softplus(x):
    return torch.logaddexp(x, x * 0)


def exact_pairs(lp, ref, kind):
    """Return the loss of two pairs with the default options."""
    found = []
    for chosen, rejected in ((0, 2), (1, 3)):
        if kind == "dpo":
            margin = sum(0.1 * (x - y) for x, y in zip(lp[chosen], ref[chosen])) - sum(
                0.1 * (x - y) for x, y in zip(lp[rejected], ref[rejected])
            )
            found.append(softplus(-margin))
            continue
        good, bad = (sum(lp[row]) / len(lp[row]) for row in (chosen, rejected))
        if kind == "simpo":
            found.append(softplus(-(2.0 * good - 2.0 * bad - 1.0)))
        else:
            odds = [x - torch.log1p(-torch.exp(x)) for x in (good, bad)]
            found.append(-good + 0.1 * softplus(odds[1] - odds[0]))
    return sum(found) / 2


def exact_kto(lp, ref, desirable):
    gains = [0.1 * (sum(x - y for x, y in zip(a, b)) - 0.3) for a, b in zip(lp, ref, strict=True)]
    signed = [gain if good else -gain for gain, good in zip(gains, desirable)]
    return sum(torch.exp(-softplus(gain)) for gain in signed) / len(signed)


ADVANTAGES, GOOD = [1.0, -0.5, -2.0, 1.5], [True, False, False, True]
POLICY = {"advantages": torch.tensor(ADVANTAGES)}
OF_EXTREMES = {  # objective, its arguments, the name of the other policy's, the exact loss
    "grpo": (grpo_loss, POLICY, "old_log_probs", lambda a, b: exact_policy(a, b, ADVANTAGES, 0.2, 0.2)),
    "dapo": (
        dapo_loss, POLICY, "old_log_probs",
        lambda a, b: exact_policy(a, b, ADVANTAGES, 0.2, 0.28, by_token=True),
    ),
    "gspo": (
        gspo_loss, POLICY, "old_log_probs",
        lambda a, b: exact_policy(a, b, ADVANTAGES, 3e-4, 4e-4, of_sequence=True),
    ),
    "dpo": (dpo_loss, {}, "ref_log_probs", lambda a, b: exact_pairs(a, b, "dpo")),
    "simpo": (simpo_loss, {}, None, lambda a, b: exact_pairs(a, b, "simpo")),
    "orpo": (orpo_loss, {}, None, lambda a, b: exact_pairs(a, b, "orpo")),
    "kto": (
        kto_loss, {"desirable": torch.tensor(GOOD), "reference_point": 0.3}, "ref_log_probs",
        lambda a, b: exact_kto(a, b, GOOD),
    ),
}  # fmt: skip


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", OF_EXTREMES)
def test_extreme_log_probabilities(name, extreme):
    """Value and gradient are those of a loop in float64, with -1e30 for -inf; no metric is NaN."""
    for rows in ((0, 3), (1, 2), (0, 1, 2, 3)):
        for dtype in (torch.float64, torch.float32):
            check_extreme(name, extreme, rows, dtype)


def check_extreme(name, extreme, rows, dtype):
    objective, arguments, other_name, exact = OF_EXTREMES[name]
    torch.manual_seed(0)
    lp, other = -1 - torch.rand(4, 3), -1 - torch.rand(4, 3)
    for row in rows:
        lp[row, 1], other[row, 1] = EXTREMES[extreme]
    mask = torch.ones(4, 3, dtype=torch.bool)
    given = lp.to(dtype, copy=True).requires_grad_()
    more = {} if other_name is None else {other_name: other.to(dtype)}
    loss, metrics = objective(given, mask, **arguments, **more)
    (grad,) = torch.autograd.grad(loss, given)
    assert all(value.isfinite() for value in metrics.values()), metrics
    leaves = [[x.double().requires_grad_() for x in row] for row in lp]
    finite = [[x.clamp(min=-1e30) for x in row] for row in leaves]
    want = exact(finite, [[max(x, -1e30) for x in row] for row in other.double().tolist()])
    of_nothing = 0 * leaves[0][0].clamp(min=0)  # where all ratios are at their limit
    (want + of_nothing).backward()
    found = [x.new_zeros(()) if x.grad is None else x.grad for row in leaves for x in row]
    wanted = torch.stack(found).view(4, 3)
    close = {"rtol": 1e-9, "atol": 1e-12}
    if dtype == torch.float32:  # means of -1e4 cancel
        close = {"rtol": 2e-5, "atol": 2e-3 if extreme.startswith("unlikely") else 1e-6}
    torch.testing.assert_close(loss.double(), want, **close)
    torch.testing.assert_close(grad.double(), wanted, **close)


def test_extreme_policies_of_one_s_own_and_penalties():
    """Without old log-probabilities the ratio is 1; k3 of two impossible tokens and its gradient are 0."""
    lp = torch.tensor([[-math.inf, -1.0], [-0.5, -math.inf]], requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages = torch.tensor([1.0, -3.0])
    for objective in (grpo_loss, dapo_loss, gspo_loss):
        loss, metrics = objective(lp, mask, advantages=advantages)
        (grad,) = torch.autograd.grad(loss, lp)
        assert loss.item() == pytest.approx(1.0) and metrics["ratio"] == 1
        assert metrics["kl_old_k1"] == metrics["kl_old_k3"] == 0
        assert grad.flatten().tolist() == pytest.approx([0.0, -0.25, 0.75, 0.0])
    for objective in (grpo_loss, gspo_loss):
        loss, metrics = objective(lp, mask, advantages=advantages, ref_log_probs=lp.detach(), beta=0.5)
        assert loss.item() == pytest.approx(1.0) and metrics["kl_ref_k3"] == 0
        assert torch.autograd.grad(loss, lp)[0].isfinite().all()
    for level in ("token", "sequence"):
        weights = mismatch_weights(lp, lp, mask, level=level)
        assert torch.equal(weights, torch.ones(2, 2))
    generated = torch.tensor([[-1.0, -1.0], [-0.5, -0.5]])
    assert mismatch_weights(lp, generated, mask).isfinite().all()
    assert kto_reference_point(lp, mask, ref_log_probs=lp) == 0
    for estimate in kl_estimates(lp, lp):
        assert not estimate.any()


@pytest.mark.parametrize("name", OF_EXTREMES)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), "packed"], ids=str)
def test_nothing_at_all_is_a_loss_of_zero(name, shape):
    """No sequence, no token, and packed sequences without tokens."""
    objective, arguments, other_name, _ = OF_EXTREMES[name]
    packed_only = shape == "packed"
    log_probs = torch.zeros((0,) if packed_only else shape, requires_grad=True)
    count = 4 if packed_only else shape[0]
    more = {} if other_name is None else {other_name: log_probs.detach()}
    more |= {key: value[:count] if torch.is_tensor(value) else value for key, value in arguments.items()}
    more |= {"cu_seqlens": torch.zeros(5, dtype=torch.int32)} if packed_only else {}
    loss, metrics = objective(log_probs, torch.ones_like(log_probs, dtype=torch.bool), **more)
    loss.backward()
    assert loss == 0 and log_probs.grad.shape == log_probs.shape
    assert all(value == 0 for value in metrics.values()), metrics


def test_certain_answers_have_finite_odds():
    log_probs, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    loss, _ = orpo_loss(log_probs, mask)
    assert loss.item() == pytest.approx(0.1 * math.log(2))
    assert torch.autograd.grad(loss, log_probs)[0].isfinite().all()


def test_grpo_by_hand():
    """Ratios 2, 1/2 and 1 of a good answer, 2 of a bad one."""
    log_probs = torch.log(torch.tensor([[0.4, 0.2, 0.5], [0.5, 1.0, 1.0]], dtype=torch.float64))
    old = torch.log(torch.tensor([[0.2, 0.4, 0.5], [0.25, 1.0, 1.0]], dtype=torch.float64))
    mask = torch.tensor([[True, True, True], [True, False, False]])
    arguments = {"advantages": torch.tensor([1.0, -1.0]), "old_log_probs": old}
    loss, metrics = grpo_loss(log_probs, mask, **arguments)
    # the first: min(2, 1.2) + min(0.5, 0.8) + 1 = 2.7 over three tokens; the second: min(-2, -1.2) = -2
    assert loss.item() == pytest.approx(-(2.7 / 3 - 2) / 2)
    assert metrics["clip_fraction"] == metrics["clip_fraction_high"] == 0.25
    assert metrics["clip_fraction_low"] == 0
    assert metrics["ratio"].item() == pytest.approx((2 + 0.5 + 1 + 2) / 4)
    assert metrics["kl_old_k1"].item() == pytest.approx(-math.log(2) / 4)
    assert metrics["kl_old_k3"].item() == pytest.approx(
        (1 - math.log(2) + -0.5 + math.log(2) + 1 - math.log(2)) / 4
    )
    assert dapo_loss(log_probs, mask, **arguments)[0].item() == pytest.approx(-(1.28 + 0.5 + 1 - 2) / 4)
    # two-sided: the ratio of the bad answer is at most 1.5
    assert grpo_loss(log_probs, mask, **arguments, delta=1.5)[0].item() == pytest.approx(-(0.9 - 1.5) / 2)
    # the ratio of the first sequence is (2 * 1/2 * 1)^(1/3) = 1
    assert gspo_loss(log_probs, mask, **arguments)[0].item() == pytest.approx(-(1 - 2) / 2)


def test_preferences_by_hand():
    """One pair: probabilities 1/2 and 1/2 of the chosen answer, 1/8 of the rejected one."""
    log_probs = torch.log(torch.tensor([[0.5, 0.5], [0.125, 1.0]], dtype=torch.float64))
    ref = torch.log(torch.tensor([[0.25, 0.5], [0.25, 1.0]], dtype=torch.float64))
    mask = torch.tensor([[True, True], [True, False]])
    loss, metrics = dpo_loss(log_probs, mask, ref_log_probs=ref, beta=1.0)
    assert loss.item() == pytest.approx(math.log(1 + 1 / 4))  # -log sigmoid(log 2 + log 2)
    assert metrics["reward_margin"].item() == pytest.approx(2 * math.log(2))
    assert metrics["reward_accuracy"] == 1
    loss, _ = simpo_loss(log_probs, mask, beta=1.0, gamma=math.log(2))
    assert loss.item() == pytest.approx(math.log(1 + 1 / 2))  # -log sigmoid(log 4 - log 2)
    loss, metrics = orpo_loss(log_probs, mask, beta=1.0)
    assert loss.item() == pytest.approx(math.log(2) + math.log(1 + 1 / 7))  # odds 1 and 1/7
    assert metrics["nll"].item() == pytest.approx(math.log(2))
    kto = {"ref_log_probs": ref, "desirable": torch.tensor([True, False]), "beta": 1.0}
    loss, metrics = kto_loss(log_probs, mask, **kto, reference_point=0.0)
    assert loss.item() == pytest.approx((1 / 3 + 1 / 3) / 2)  # 1 - sigmoid(log 2), of both
    assert metrics["reward_margin"].item() == pytest.approx(2 * math.log(2))
    assert sequence_log_probs(log_probs, mask, average=True).tolist() == pytest.approx(
        [-math.log(2), -math.log(8)]
    )


def test_gradient_of_gspo_for_tokens_is_that_for_sequences():
    _, _, _, mask, other = problem()
    grads = []
    for advantages in (other["advantages"], other["advantages"][:, None].expand(B, S)):
        log_probs = (other["old"] + 1e-4).requires_grad_()
        loss, _ = gspo_loss(log_probs, mask, advantages=advantages, old_log_probs=other["old"])
        grads.append(torch.autograd.grad(loss, log_probs)[0])
    assert grads[0].any()
    torch.testing.assert_close(*grads, **CLOSE)


def test_gspo_clamps_the_mean_of_log_ratios_and_not_its_terms():
    mask, old = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.float64)
    log_probs = torch.tensor([[-30.0, 0.0]], dtype=torch.float64, requires_grad=True)
    options = {"advantages": torch.ones(1), "old_log_probs": old, "epsilon_low": 1.0, "epsilon_high": 1.0}
    loss, _ = gspo_loss(log_probs, mask, **options)
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(-math.exp(-15))
    assert grad[0].tolist() == pytest.approx([-math.exp(-15) / 2] * 2)


def test_without_old_log_probabilities_the_policy_is_its_own():
    _, _, _, mask, other = problem()
    log_probs = other["ref"].clone().requires_grad_()
    loss, metrics = grpo_loss(log_probs, mask, advantages=other["advantages"])
    same, _ = grpo_loss(
        log_probs, mask, advantages=other["advantages"], old_log_probs=log_probs.detach().clone()
    )
    torch.testing.assert_close(*[torch.autograd.grad(x, log_probs)[0] for x in (loss, same)])
    assert metrics["ratio"] == 1 and metrics["clip_fraction"] == 0


def test_microbatches_with_the_divisor_of_the_step_add_up():
    _, _, _, mask, other = problem()
    log_probs = other["ref"]
    for normalize, divisor in (("token", mask.sum()), ("sequence", 3)):
        options = {"normalize": normalize, "divisor": divisor}
        parts = [
            grpo_loss(
                log_probs[rows], mask[rows], advantages=other["advantages"][rows],
                old_log_probs=other["old"][rows], **options,
            )[0]
            for rows in (slice(0, 1), slice(1, 4))
        ]  # fmt: skip
        whole, _ = grpo_loss(
            log_probs, mask, advantages=other["advantages"], old_log_probs=other["old"], normalize=normalize
        )
        torch.testing.assert_close(sum(parts), whole, **CLOSE)


def test_kl_estimates_are_unbiased():
    """Their means over all tokens, weighted by the policy's probabilities, are the divergence."""
    generator = torch.Generator().manual_seed(0)
    policy, other = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(1)
    divergence = (policy.exp() * (policy - other)).sum()
    k1, k2, k3 = kl_estimates(policy, other)
    for estimate in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimate).sum(), divergence, **CLOSE)
    assert (k3 >= 0).all() and (k2 >= 0).all() and (k1 < 0).any()


def test_mismatch_weights_by_hand():
    log = lambda rows: torch.log(torch.tensor(rows, dtype=torch.float64))  # noqa: E731
    train, generated = log([[0.9, 0.1, 0.3], [0.5, 0.2, 0.1]]), log([[0.3, 0.4, 0.3], [0.5, 0.1, math.nan]])
    mask = torch.tensor([[True, True, True], [True, True, False]])

    def weights(**options):
        return mismatch_weights(train, generated, mask, **options).flatten().tolist()

    assert weights() == pytest.approx([2, 0.25, 1, 1, 2, 0])
    assert weights(outside="zero", low=0.5, high=5.0) == pytest.approx([3, 0, 1, 1, 2, 0])
    assert weights(level="sequence") == pytest.approx([0.75] * 3 + [2, 2, 0])
    assert weights(level="sequence", outside="zero", high=1.5) == pytest.approx([0.75] * 3 + [0] * 3)


def test_group_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0])
    found = group_advantages(rewards, 4)
    assert found[:4].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-3)
    assert not found[4:].any()  # all alike: nothing to learn
    assert group_advantages(rewards, 4, scale=False).tolist() == [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]
    for dtype in (torch.int64, torch.bfloat16):  # in float32 whatever the rewards are
        assert torch.equal(group_advantages(rewards.to(dtype), 4), found)


def check_reference_point(rank, size):
    log_probs = torch.tensor([[[1.0, 0.5]], [[2.0, math.nan]]])[rank]
    mask = torch.tensor([[[True, True]], [[True, False]]])[rank]
    return kto_reference_point(
        log_probs, mask, ref_log_probs=torch.zeros(1, 2), group=dist.group.WORLD if size > 1 else None
    ).item()


def test_reference_point_is_averaged_over_ranks():
    assert run_ranks(check_reference_point, 2) == [1.75, 1.75]
    log_probs, mask = -torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert kto_reference_point(log_probs, mask, ref_log_probs=torch.zeros(2, 3)) == 0  # never negative


def test_ignored_tokens_take_part_in_no_gemm(monkeypatch):
    hidden, weight, ids, mask, _ = problem()
    rows, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **options: (rows.append(a.shape), mm(a, b, **options))[1])
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = token_log_probs(*leaves, ids, mask, return_entropy=True)
    live = int(mask.sum())
    assert rows == [(live, H)]
    assert not log_probs[~mask].any() and not entropy[~mask].any()
    (log_probs.sum() + entropy.sum()).backward()
    assert rows[1:] == [(live, H), (live, V), (V, live)]  # logits again, dgrad, wgrad
    assert not hidden.grad[~mask].any() and hidden.grad[mask].all()


LP, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: grpo_loss(LP, LP, advantages=LP), "grpo_loss: expected a bool mask, got torch.float32"),
        (lambda: grpo_loss(LP, MASK[0], advantages=LP), r"expected mask \(B, S\), or \(N,\) with cu_seqlens"),
        (lambda: grpo_loss(LP, MASK, advantages=LP, beta=0.1), "grpo_loss: beta=0.1 needs ref_log_probs"),
        (lambda: grpo_loss(LP, MASK, advantages=LP, delta=1.1), r"delta=1.1 must exceed 1 \+ epsilon_high"),
        (lambda: grpo_loss(LP, MASK, advantages=LP, normalize="mean"), "normalize"),
        (lambda: dapo_loss(LP, MASK, advantages=LP, epsilon_low=1.2), r"epsilon_low within \[0, 1\]"),
        (lambda: gspo_loss(LP, MASK, advantages=LP[:1]), "gspo_loss: .*advantages"),
        (lambda: dpo_loss(LP[:1], MASK[:1], ref_log_probs=LP[:1]), "as many rejected ones, got 1 sequences"),
        (
            lambda: simpo_loss(LP[0], MASK[0], cu_seqlens=torch.tensor([0, 2])),
            r"cu_seqlens must rise from 0 to the 3 tokens of mask, got \[0, 2\]",
        ),
        (
            lambda: kto_loss(LP, MASK, ref_log_probs=LP, desirable=MASK[0], reference_point=0.0),
            r"expected desirable of shape \(2,\), one for each sequence, got \(3,\)",
        ),
        (lambda: mismatch_weights(LP, LP, MASK, low=0.5), 'low=0.5 needs outside="zero"'),
        (lambda: group_advantages(torch.zeros(5), 2), r"rewards \(B,\) in groups of 2, got shape \(5,\)"),
        (lambda: token_log_probs(LP[..., None], LP[:, :1], MASK.long(), LP), "expected a bool mask"),
        (
            lambda: token_log_probs(LP, LP, MASK[0].long(), MASK[0], sequence_first=True),
            r"sequence_first expects ids \(B, S\) for hidden \(S, B, H\)",
        ),
    ),
)  # fmt: skip
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
