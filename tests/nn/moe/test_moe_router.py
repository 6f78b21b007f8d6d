"""The router by itself: logits in a wide dtype, losses, jitter, and balancing by a bias."""

from __future__ import annotations

import pytest
import torch
from moe_tools import SCORES, SEED, SMALL, hidden_states, plain_moe, with_moe

from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement
from fastmp.nn.moe.router import Router, router_logits, update_expert_biases


def make_router(config, dtype=torch.float64, **options):
    return Router(config, Placement(rng=RngTracker(SEED), dtype=dtype, **options))


def test_logits_of_narrow_tokens_are_wide():
    x = hidden_states(40, 3).bfloat16().requires_grad_()
    weight = torch.randn(8, 16).bfloat16().requires_grad_()
    logits = router_logits(x, weight)
    truth = x.detach().double() @ weight.detach().double().t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), truth, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(logits)
    dx, dweight = torch.autograd.grad(logits, (x, weight), grad)
    assert dx.dtype == dweight.dtype == torch.bfloat16
    want = (grad.double() @ weight.double(), grad.flatten(0, 1).double().t() @ x.flatten(0, 1).double())
    torch.testing.assert_close(dx.double(), want[0], rtol=5e-3, atol=1e-2)
    torch.testing.assert_close(dweight.double(), want[1], rtol=5e-3, atol=1e-2)


def widened_product(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("main_grad", (None, torch.float32, "narrow"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_tensor_cores_are_as_exact_as_wide_operands(dtype, main_grad, device, monkeypatch):
    """On a CPU, which lacks the product that returns float32, by its formula."""

    def results(narrow):
        x, weight = (t.detach().clone().requires_grad_() for t in operands)
        if main_grad is not None:
            weight.main_grad = torch.zeros_like(weight, dtype=dtype if main_grad == "narrow" else main_grad)
        with monkeypatch.context() as patch:
            patch.setattr("fastmp.nn.moe.router._on_tensor_cores", lambda x, weight: narrow)
            if device == "cpu":
                patch.setattr(torch, "mm", widened_product)
            logits = router_logits(x, weight)
            logits.backward(grad)
        return logits, x.grad, weight.grad if main_grad is None else weight.main_grad

    torch.manual_seed(SEED)
    operands = torch.randn(40, 3, 64, device=device).to(dtype), torch.randn(8, 64, device=device).to(dtype)
    grad = torch.randn(40, 3, 8, device=device) * torch.logspace(-3, 1, 40, device=device)[:, None, None]
    x, weight = (t.double() for t in operands)
    truth = x @ weight.t(), grad.double() @ weight, grad.flatten(0, 1).double().t() @ x.flatten(0, 1)
    more = 1e-6, 2**-17, 2**-17  # the bits of two parts of a gradient
    for ours, wide, exact, added in zip(results(True), results(False), truth, more, strict=True):
        assert ours.dtype == wide.dtype
        error, bound = ((each.double() - exact).norm() / exact.norm() for each in (ours, wide))
        assert error <= 1.1 * bound + added


def test_gradients_of_logits():
    x, weight = hidden_states(3, 2).requires_grad_(), torch.randn(5, 16).double().requires_grad_()
    assert torch.autograd.gradcheck(router_logits, (x, weight))
    (dweight,) = torch.autograd.grad(router_logits(x.detach(), weight).sum(), weight)
    torch.testing.assert_close(dweight, x.detach().sum((0, 1)).expand(5, -1))


def test_autocast_leaves_the_logits_alone():
    x, weight = torch.randn(6, 2, 16), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, weight)
    assert logits.dtype == torch.float32 and torch.equal(logits, x @ weight.t())


def deepseek_v3_loss(scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    """Equations 17 to 20 of arXiv 2412.19437 with alpha 1 for one sequence, times its tokens."""
    T, E = scores_TE.shape
    f_E = torch.zeros(E, dtype=torch.float64)
    for t in range(T):
        f_E[scores_TE[t].topk(k).indices] += E / (k * T)
    P_E = (scores_TE / scores_TE.sum(1, keepdim=True)).mean(0)
    return T * (f_E * P_E).sum()


@pytest.mark.parametrize("score", ("sigmoid", "softmax", "sqrtsoftplus"))
@pytest.mark.parametrize("loss", ("sequence_aux_loss", "aux_loss"))
def test_the_losses_count_the_best_scores_without_bias_and_groups(loss, score):
    """DeepSeek-V3's paper and Megatron-LM do so; the loads count the choices that are made."""
    router = make_router(plain_moe(score=score, expert_bias=True, num_groups=4, group_topk=2, **{loss: 0.7}))
    router.expert_bias.copy_(torch.linspace(0.6, -0.6, 8))
    hidden = hidden_states(6, 2)
    logits_SBE = hidden @ router.weight.t()
    scores_SBE = SCORES[score](logits_SBE)
    if loss == "aux_loss":  # the tokens of both sequences are one set
        scores_SBE = scores_SBE.flatten(0, 1).unsqueeze(1)
    want = 0.7 * sum(deepseek_v3_loss(scores_TE, 3) for scores_TE in scores_SBE.unbind(1))
    indices_Tk, _, aux, counts_E = router(hidden)
    torch.testing.assert_close(aux, want)
    torch.testing.assert_close(*(torch.autograd.grad(x, router.weight)[0] for x in (aux, want)))
    assert counts_E.tolist() == indices_Tk.flatten().bincount(minlength=8).tolist()
    best_TEk = logits_SBE.flatten(0, 1).topk(3).indices
    assert counts_E.tolist() != best_TEk.flatten().bincount(minlength=8).tolist()  # the bias has moved some


def test_evaluation_has_no_loss_and_the_same_choice():
    router, hidden = make_router(with_moe()), hidden_states(4, 2)
    training, evaluation = router(hidden), router.eval()(hidden)
    assert training[2] > 0 and evaluation[2] == 0
    for index in (0, 1, 3):
        assert torch.equal(training[index], evaluation[index])


def test_the_bias_moves_loads_towards_each_other():
    router = make_router(plain_moe(top_k=2, expert_bias=True, bias_update_rate=0.004, score="sigmoid"))
    hidden = hidden_states(64, 4)
    first = router(hidden)[3]
    for _ in range(100):
        router.update_expert_bias(router(hidden)[3])
    last = router(hidden)[3]
    assert first.sum() == last.sum() == 64 * 4 * 2
    assert last.double().std() < 0.4 * first.double().std()
    before = router.expert_bias.clone()
    router.update_expert_bias(torch.tensor([10, 20, 30, 40, 25, 25, 25, 25]))
    moved = (router.expert_bias - before) / 0.004
    torch.testing.assert_close(moved, torch.tensor([1.0, 1, -1, -1, 0, 0, 0, 0]).double())


@pytest.mark.parametrize(
    "rates", [(0.004, 0.004, 0.004), (0.004, 0.002, 0.004)], ids=["one rate", "two rates"]
)
def test_biases_of_a_model_move_together(rates):
    def make():
        moes = [plain_moe(expert_bias=True, bias_update_rate=rate, score="sigmoid") for rate in rates]
        return [make_router(moe) for moe in moes]

    counts = torch.randint(100, (3, 8))
    one_by_one, together = make(), make()
    for router, own in zip(one_by_one, counts):
        router.update_expert_bias(own)
    update_expert_biases(together, counts)
    for one, other in zip(one_by_one, together):
        assert one.expert_bias.any() and torch.equal(one.expert_bias, other.expert_bias)
    update_expert_biases([make_router(plain_moe())] * 3, counts)  # nothing to move


def test_a_router_of_another_class_gets_its_counts():
    router, got = make_router(plain_moe(expert_bias=True, score="sigmoid")), []
    router.update_expert_bias = got.append
    counts = torch.randint(100, (2, 8))
    update_expert_biases([router, router], counts)
    assert torch.equal(torch.stack(got), counts) and not router.expert_bias.any()


def test_without_a_bias_there_is_nothing_to_move():
    router = make_router(plain_moe())
    router.update_expert_bias(torch.arange(8))
    assert router.expert_bias is None and list(router.state_dict()) == ["weight"]


def test_jitter_is_of_training_and_of_its_own_stream():
    router, hidden = make_router(plain_moe(jitter=0.2, aux_loss=1.0)), hidden_states(4, 2)
    state = torch.get_rng_state()
    first, second = router(hidden)[2], router(hidden)[2]
    assert first != second
    assert torch.equal(torch.get_rng_state(), state)  # drawn from the stream of the TP rank
    router.eval()
    assert torch.equal(router(hidden)[1], router(hidden)[1])
    noise = router.train()._jittered(torch.ones(400, 2, SMALL.hidden_size)) - 1
    assert noise.abs().max() <= 0.2 and abs(noise.mean()) < 0.01 and abs(noise.std() - 0.2 / 3**0.5) < 0.01


@pytest.mark.parametrize("score", ("softmax", "sigmoid", "sqrtsoftplus"))
def test_groups_limit_the_choice(score):
    """Two of four groups: the chosen experts are in two of them."""
    router = make_router(plain_moe(score=score, num_groups=4, group_topk=2, top_k=3))
    indices = router(hidden_states(16, 2))[0]
    assert all(len(set((row // 2).tolist())) <= 2 for row in indices)
