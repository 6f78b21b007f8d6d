"""The expert layer on one rank: what it computes, what it drops, how its weights start, what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe_tools import MOE, SEED, SMALL, forced, hidden_states, make_moe, plain_moe, reference, with_moe
from torch.multiprocessing.reductions import StorageWeakRef

from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement
from fastmp.nn.moe import layer as layer_module
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.nn.moe.layer import MoELayer
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.tensor_parallel.attributes import ParallelAttributes, parallel_attributes

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
CONFIGS = {
    "all": with_moe(),
    "one expert": plain_moe(num_experts=1, top_k=1, aux_loss=0.5),
    "every expert": plain_moe(top_k=8),
    "sigmoid": plain_moe(score="sigmoid", expert_bias=True, routed_scale=2.5, aux_loss=0.5),
    "sqrtsoftplus": plain_moe(score="sqrtsoftplus", expert_bias=True, aux_loss=0.5, sequence_aux_loss=0.3),
    "no sequence loss": with_moe(sequence_aux_loss=0.0),
    "ungated": with_moe(shared_expert_gate=False, normalize_topk=False),
    **{name: replace(with_moe(), activation=name) for name in ("gelu", "gelu_tanh", "geglu")},
}


def results_of(layer, hidden, compute, weight):
    output, aux, counts = compute(hidden)
    leaves = (hidden, *layer.parameters())
    grads = torch.autograd.grad((output * weight).sum() + aux, leaves, allow_unused=True)
    return output, torch.as_tensor(aux), counts, *grads


def compare(layer, hidden, kept=lambda indices, probs: probs):
    """The layer is the loop over tokens and experts: output, loss, counts, every gradient."""
    hidden = hidden.detach().requires_grad_()
    weight = hidden_states(*hidden.shape[:2], seed=6)
    ours = results_of(layer, hidden, layer, weight)
    plain = results_of(layer, hidden, lambda x: reference(layer, x, kept), weight)
    for value, want in zip(ours, plain, strict=True):
        if want is None:  # an expert that no token reaches
            want = torch.zeros_like(value)
        torch.testing.assert_close(value, want, check_dtype=False, **CLOSE)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_loop_over_tokens_and_experts(name):
    layer = make_moe(CONFIGS[name])
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    compare(layer, hidden_states(5, 2))


@pytest.mark.interpret
@pytest.mark.parametrize("name", ("all", "gelu"))
def test_the_chain_of_triton_kernels_interpreted(name):
    """float32 through the kernels of all ops of the layer, against the loop in float64."""
    exact = make_moe(CONFIGS[name])
    layer = make_moe(CONFIGS[name]).float()
    weight, results = hidden_states(5, 2, seed=6), []
    for each, compute in ((layer, layer), (exact, lambda x: reference(exact, x))):
        hidden = hidden_states(5, 2).to(each.router.weight.dtype).requires_grad_()
        results.append(results_of(each, hidden, compute, weight.to(hidden.dtype)))
    for value, want in zip(*results, strict=True):
        torch.testing.assert_close(value.double(), want.double(), rtol=1e-4, atol=1e-4)


# Logits of tokens: kinds of rows, so that experts get none, all, or as many as the others.
@st.composite
def routings(draw, experts=8):
    """(S, B, E) logits; S may be 0."""
    S, B = draw(st.integers(0, 4)), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(("one expert", "equal", "two experts", "ties", "any")))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(S, B, experts, dtype=torch.float64, generator=generator)
    if kind == "one expert":
        logits[..., draw(st.integers(0, experts - 1))] += 20.0
    elif kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "two experts":
        logits[..., 2:] -= 20.0
    elif kind == "ties":
        logits = logits.round()
    return logits


@settings(max_examples=60)
@given(logits=routings(), k=st.sampled_from((1, 2, 8)), shared=st.booleans())
@example(logits=torch.zeros(3, 1, 8, dtype=torch.float64), k=8, shared=False)
@example(logits=torch.zeros(0, 2, 8, dtype=torch.float64), k=2, shared=True)
def test_any_routing(logits, k, shared):
    off = {} if shared else {"shared_expert_ffn_hidden_size": 0, "shared_expert_gate": False}
    layer = make_moe(with_moe(top_k=k, **off))
    compare(layer, forced(layer, logits))


def keep(capacity, policy, experts=8):
    """Drop by hand: for each expert its tokens from the best to the worst, the earlier of equals first."""

    def kept(indices, probs):
        probs = probs.clone()
        for expert in range(experts):
            pairs = (indices == expert).nonzero().tolist()
            if policy == "probs":
                pairs.sort(key=lambda pair: -probs[tuple(pair)].item())  # stable
            for pair in pairs[capacity:]:
                probs[tuple(pair)] = 0.0
        return probs

    return kept


@pytest.mark.parametrize("policy", ("probs", "position"))
@settings(max_examples=25)
@given(logits=routings(), k=st.sampled_from((1, 3)), factor=st.sampled_from((1.0, 1.5, 3.0)))
def test_capacity_drops_what_the_policy_says(policy, logits, k, factor):
    layer = make_moe(with_moe(top_k=k, capacity_factor=factor, drop_policy=policy))
    share = factor * logits.shape[0] * logits.shape[1] * k / 8
    if 0 < share < 1:
        with pytest.raises(ValueError, match=r"a capacity of .* tokens is less than one"):
            layer(forced(layer, logits))
        return
    capacity = -int(-share // 1)
    assert not len(logits) or layer._capacity(logits) == capacity
    compare(layer, forced(layer, logits), keep(capacity, policy))


@pytest.mark.parametrize(("policy", "kept"), [("probs", [1, 3]), ("position", [0, 1])])
def test_which_tokens_are_dropped(policy, kept):
    """Four tokens, all to expert 1 of 2, room for two; tokens 1 and 3 are equal and surest of it."""
    room = {"drop_policy": policy, "capacity_factor": 1.0, "normalize_topk": False}
    config = plain_moe(num_experts=2, top_k=1, **room)
    layer = make_moe(config)
    hidden = forced(layer, torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0], [0.0, 3.0]]).double()[:, None])
    output, _, counts = layer(hidden)
    assert output.abs().sum((1, 2)).nonzero().flatten().tolist() == kept
    assert counts.tolist() == [0, 4]  # before anything is dropped
    assert layer.eval()(hidden)[0].abs().sum((1, 2)).count_nonzero() == 4  # evaluation drops nothing


def test_main_gradients_take_what_the_products_add():
    """Expert weights never have a .grad; everything else goes through the hooks. Two microbatches."""
    layer, twin = make_moe(with_moe()), make_moe(with_moe())
    buffer = GradBuffer(layer.named_parameters())
    for seed in (1, 2):
        for each in (layer, twin):
            output, aux, _ = each(hidden_states(4, 2, seed=seed))
            (output.square().sum() + aux).backward()
    assert buffer.parameters.keys() == dict(twin.named_parameters()).keys()
    for (name, param), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert param.grad is None, name
        torch.testing.assert_close(param.main_grad, other.grad, **CLOSE)


@pytest.mark.parametrize("autocast", (False, True))
def test_in_bfloat16(autocast):
    layer = make_moe(with_moe(), dtype=torch.float32 if autocast else torch.bfloat16)
    exact = make_moe(with_moe()).double()
    exact.load_state_dict(layer.state_dict())
    x = hidden_states(32, 2).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, aux, counts = layer(x.float() if autocast else x)
    truth, exact_aux, exact_counts = exact(x.double())
    assert counts.tolist() == exact_counts.tolist() and aux.dtype == torch.float32
    torch.testing.assert_close(aux.double(), exact_aux, rtol=1e-5, atol=0)
    assert (output.double() - truth).norm() < 2e-2 * truth.norm()
    (output.float().square().sum() + aux).backward()
    assert all(param.grad.dtype == param.dtype for param in layer.parameters())


def test_compiles_to_one_graph():
    layer = make_moe(with_moe())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, leaves = hidden_states(4, 2).requires_grad_(), tuple(layer.parameters())
    results = []
    for run in (layer, compiled):
        output, aux, counts = run(x)
        grads = torch.autograd.grad(output.square().sum() + aux, (x, *leaves))
        results.append((output, aux, counts, *grads))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, **CLOSE)


def test_weights_are_drawn_expert_by_expert():
    """An expert's weights depend on its number, not on how many there are, and the stream moves on by one
    draw."""

    def draw(experts, dtype):
        torch.manual_seed(3)
        config = plain_moe(num_experts=experts, top_k=1, normalize_topk=False)
        drawn = GroupedExperts(config, Placement(dtype=dtype))
        return drawn, torch.get_rng_state()

    (few, state), (many, other) = draw(2, torch.float32), draw(8, torch.float32)
    assert torch.equal(state, other)
    assert torch.equal(few.fc1, many.fc1[:2]) and torch.equal(few.fc2, many.fc2[:2])
    assert len({tuple(expert.flatten().tolist()) for expert in many.fc1}) == 8
    assert abs(many.fc1.std() / SMALL.init_std - 1) < 0.05
    assert abs(many.fc2.std() / (SMALL.init_std / 2) - 1) < 0.08  # of two layers: divided by sqrt(2 * 2)
    assert torch.equal(draw(8, torch.bfloat16)[0].fc1, many.fc1.bfloat16())


EXPECTED_MARKS = {
    "router.weight": ParallelAttributes(sequence_parallel=True),
    "experts.fc1": ParallelAttributes(True, 1, 2, False, True),
    "experts.fc2": ParallelAttributes(True, 2, 1, False, True),
    "shared_experts.gate": ParallelAttributes(sequence_parallel=True),
    "shared_experts.mlp.up.weight": ParallelAttributes(True, 0, 2),
    "shared_experts.mlp.down.weight": ParallelAttributes(True, 1, 1),
}


def test_parameters_carry_their_marks_through_conversions_and_copies():
    def marks(layer):
        return {name: parallel_attributes(param) for name, param in layer.named_parameters()}

    layer = make_moe(with_moe(expert_bias=True), sequence_parallel=True)
    assert marks(layer) == EXPECTED_MARKS
    twin = copy.deepcopy(layer)
    assert marks(twin) == EXPECTED_MARKS and twin.experts.fc1 is not layer.experts.fc1
    layer.load_state_dict({name: t.clone() for name, t in twin.state_dict().items()}, assign=True)
    assert marks(layer) == EXPECTED_MARKS
    narrow = make_moe(with_moe(expert_bias=True), sequence_parallel=True, device="meta")
    assert marks(narrow.to_empty(device="cpu").to(torch.bfloat16)) == EXPECTED_MARKS


def test_a_conversion_leaves_the_bias_wide_and_as_it_was():
    layer = make_moe(with_moe(expert_bias=True), dtype=torch.float32)
    layer.router.expert_bias.copy_(torch.arange(8) * 1e-3 + 1)
    before = layer.router.expert_bias.clone()
    layer.to(torch.bfloat16)
    assert layer.router.weight.dtype == torch.bfloat16
    assert torch.equal(layer.state_dict()["router.expert_bias"], before)
    assert layer.double().router.expert_bias.dtype == torch.float64


class FakeStream:
    """Stands for a CUDA stream: writes down who waited for whom."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "captured"])
def test_the_shared_expert_runs_on_a_stream_of_its_own(capturing, monkeypatch):
    log, layer = [], make_moe(with_moe())
    side, current = FakeStream("side", log), FakeStream("main", log)

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            log.append(f"on {self.stream.name}")

        def __exit__(self, *error):
            log.append("back")

    expected = layer(hidden_states(4, 2))[0]
    monkeypatch.setattr(layer_module, "side_stream", lambda x: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    used = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: used.append(stream.name))
    tensors = (hidden_states(4, 2),)
    memory = StorageWeakRef(tensors[0].untyped_storage())
    for segment in layer.segments():
        log.append(segment.name)
        assert not (capturing and memory.expired()), "it may be used again ahead of the side stream"
        with torch.no_grad():  # autograd would hold the input
            tensors = segment.run(*tensors)
    asked = ["on side", "back"] if capturing else []  # does it take part in the capture?
    assert log == [
        "router", "preprocess", "shared_experts", "side waits for main", "on side", "back", "dispatch",
        "experts", "combine", *asked, "main waits for side",
    ]  # fmt: skip
    # input and output live until the stream that uses them is done; in a capture by what refers to them
    assert used == ([] if capturing else ["side", "main"])
    torch.testing.assert_close(tensors[0], expected, **CLOSE)
    assert memory.expired()


def test_there_is_no_side_stream_on_a_cpu():
    assert layer_module.side_stream(torch.ones(1)) is None


ONE = {"top_k": 1, "num_groups": 1, "group_topk": 1, "aux_loss": 0.0, "sequence_aux_loss": 0.0}
BAD = {
    "top_k 9 is more than num_experts 8": {"top_k": 9},
    "top_k must be positive, got 0": {"top_k": 0},
    "num_experts must be positive, got 0": {"num_experts": 0},
    "expert_ffn_hidden_size must be positive, got -1": {"expert_ffn_hidden_size": -1},
    "num_experts 8 is not divisible by num_groups 3": {"num_groups": 3},
    "group_topk 3 is more than num_groups 2": {"num_groups": 2, "group_topk": 3},
    "top_k 3 is more than the 2 experts of group_topk 1 of 4 groups": {"num_groups": 4},
    "group_score must be one of deepseek, megatron, got 'mean'": {"group_score": "mean"},
    "group_score 'megatron' needs top_k >= group_topk 4, got top_k 2": {
        **{"num_groups": 4, "group_topk": 4, "group_score": "megatron", "top_k": 2},
    },
    "score must be one of softmax, sigmoid, sqrtsoftplus, got 'tanh'": {"score": "tanh"},
    "drop_policy must be one of probs, position, got 'last'": {"drop_policy": "last"},
    "dispatcher must be one of alltoall, allgather, symmetric, deepep, got 'flex'": {"dispatcher": "flex"},
    "jitter must be in .0, 1., got 1.0": {"jitter": 1.0},
    "capacity_factor must be positive or absent, got 0.0": {"capacity_factor": 0.0},
    "aux_loss must not be negative, got -1.0": {"aux_loss": -1.0},
    "shared_expert_gate needs a shared expert": {"shared_expert_ffn_hidden_size": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_configurations_that_cannot_be(message):
    with pytest.raises(ValueError, match=f"MoEConfig: {message}"):
        replace(MOE, **BAD[message])


UNTRAINED = {
    "top_k 1 with normalize_topk gives every expert the weight 1": {**ONE, "normalize_topk": True},
    "top_k 1 with softmax over the chosen experts gives": {
        **ONE,
        "normalize_topk": False,
        "pre_softmax": False,
        "z_loss": 0.1,
    },
    "top_k 1 .* router no gradient": {**ONE, "score": "sigmoid", "normalize_topk": True, "expert_bias": True},
}


@pytest.mark.parametrize("message", UNTRAINED)
def test_a_router_without_a_gradient_runs_but_is_not_trained(message):
    layer = make_moe(plain_moe(**UNTRAINED[message]))
    assert layer(hidden_states(5, 2))[0].isfinite().all()
    with pytest.raises(ValueError, match=f"Router: {message}"):
        layer.router.check_training()
    layer.router.weight.requires_grad_(False)  # as with LoRA
    layer.router.check_training()


@pytest.mark.parametrize("score", ("softmax", "sigmoid", "sqrtsoftplus"))
def test_one_expert_of_a_token_trains_the_router(score):
    """Each configuration that is accepted has a gradient of the router, Llama 4's weights among them."""
    accepted = (
        {"normalize_topk": False},
        {"normalize_topk": True, "aux_loss": 0.1},
        {"normalize_topk": True, "sequence_aux_loss": 0.1},
        {"normalize_topk": False, "pre_softmax": False, "aux_loss": 0.1},
    )
    for options in accepted:
        layer = make_moe(plain_moe(**{**ONE, "score": score, **options}))
        layer.router.check_training()
        hidden = hidden_states(5, 2)
        out, loss, _ = layer(hidden)
        (out.square().sum() + loss).backward()
        assert layer.router.weight.grad.abs().max() > 1e-6, options


def test_a_configuration_without_experts_is_refused():
    with pytest.raises(ValueError, match=r"MoELayer: GPTConfig\.moe is None"):
        MoELayer(GPTConfig())


def test_an_unknown_way_to_draw_weights_is_refused():
    with pytest.raises(ValueError, match='Placement: init is "full" or "sharded", got \'other\''):
        Placement(init="other")


def test_defaults_are_a_small_mixture():
    layer = MoELayer(replace(GPTConfig(), moe=MoEConfig()), Placement(rng=RngTracker(SEED)))
    output, aux, counts = layer(torch.randn(4, 2, 192))
    assert output.shape == (4, 2, 192) and aux == 0.0 and counts.sum() == 16
