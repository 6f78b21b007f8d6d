"""The formulas of `fastmp plan recipe` against runs: bytes that autograd keeps, products, bytes sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import deep_ep_stand_in
import pytest
import torch
from marks import full
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fastmp.config import (
    BertConfig,
    DataConfig,
    GPTConfig,
    LatentConfig,
    MaskedLMConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RopeScaling,
    TrainConfig,
)
from fastmp.config.sizes import layer_flops_per_token
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Bert, Placement, bert_stages, gpt_stages, sum_tied_gradients
from fastmp.nn.latent_attention import LatentAttention
from fastmp.nn.mtp import FutureTokens
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.optim.from_config import make_grads, make_optimizer
from fastmp.optim.grad_buffers import param_spec
from fastmp.optim.muon import update_cost
from fastmp.pipeline.runner import Pipeline
from fastmp.plan import activations, traffic
from fastmp.plan.layout import make_grid, make_schedule, problems
from fastmp.plan.memory import memory
from fastmp.plan.parameters import fp8_copies, rank_parameters
from fastmp.plan.resources import hardware_flops
from fastmp.plan.shapes import shapes_of
from fastmp.schedule.schedule import SCHEDULES, Schedule
from fastmp.tensor_parallel.context import cut_sequence
from fastmp.tensor_parallel.fp8_linear import quantized_weights
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks
from fastmp.training.microbatches import MicrobatchRunner
from fastmp.training.stash_attachment import attach_stash

CLOSE = 0.005  # of both; what is left out are a few numbers for each expert
SMALL_CALL = 256  # bytes: counts of tokens and sums of losses
GPT2 = GPTConfig(num_layers=2, hidden_size=128, num_heads=8, vocab_size=300, max_seq_len=64)
LLAMA = replace(
    GPT2,
    num_kv_heads=2,
    norm="rmsnorm",
    position="rope",
    activation="swiglu",
    linear_bias=False,
    tie_embeddings=False,
    ffn_hidden_size=320,
)
# Every token goes to every expert: the loads are equal, as the formulas take them to be.
BALANCED = MoEConfig(num_experts=4, top_k=4, expert_ffn_hidden_size=64, aux_loss=0.01)
SHARED = replace(BALANCED, shared_expert_ffn_hidden_size=96, shared_expert_gate=True)
IN_BALANCE = replace(BALANCED, dispatcher="symmetric", symmetric_capacity=1.0)
SYMMETRIC = replace(LLAMA, moe=replace(SHARED, top_k=2, dispatcher="symmetric"))
WITHOUT_STASH = replace(SYMMETRIC, moe=replace(SYMMETRIC.moe, activation_stash=0.0))
# values as wide as queries: a CPU pads narrower ones
LATENT = LatentConfig(kv_rank=64, q_rank=96, nope_size=16, rope_size=16, value_size=32)
OF_LATENTS = replace(LLAMA, num_kv_heads=None, latent=LATENT)
MODELS = {
    "gpt2": GPT2,
    "gpt2, grouped": replace(GPT2, num_kv_heads=2),
    "gpt2, qk-norm": replace(GPT2, qk_norm=True),
    "gpt2, dropout": replace(GPT2, dropout=0.1),
    "gpt2, experts": replace(GPT2, moe=BALANCED),
    "llama": LLAMA,
    "llama, dynamic": replace(LLAMA, rope_scaling=RopeScaling("dynamic", original_max_seq_len=32)),
    "llama, dynamic, not full": replace(
        LLAMA, max_seq_len=96, rope_scaling=RopeScaling("dynamic", original_max_seq_len=32)
    ),
    "llama, half turned": replace(LLAMA, rotary_fraction=0.5),
    "qwen": replace(LLAMA, qk_norm=True, moe=BALANCED),
    "shared": replace(LLAMA, moe=SHARED),
    "some dense": replace(LLAMA, moe=SHARED, dense_layers=(0,), qkv_bias=True),
    "jitter": replace(GPT2, moe=replace(SHARED, jitter=0.1)),
    "latent": replace(OF_LATENTS, moe=SHARED),
    "latent, direct queries": replace(OF_LATENTS, latent=replace(LATENT, q_rank=None)),
    "sinks": replace(LLAMA, attention_sinks=True, linear_bias=True),
    "gpt-oss": replace(
        LLAMA,
        activation="clamped_swiglu",
        attention_sinks=True,
        moe=replace(BALANCED, linear_bias=True, router_bias=True),
    ),
    "mtp": replace(LLAMA, mtp_depth=2),
    "mtp, experts": replace(GPT2, position="rope", mtp_depth=1, moe=BALANCED),
    "bert": replace(GPT2, bert=BertConfig()),
    "bert, post-norm": replace(GPT2, bert=BertConfig(post_norm=True)),
}


CLASSIC = OptimizerConfig()
FP8 = {"precision": "fp8", "fp8_block": 32}


def recipe(model=GPT2, *, dtype="float32", microbatches=1, dp=1, optimizer=CLASSIC, train=(), **layout):
    made = Recipe(
        model=model,
        optimizer=optimizer,
        parallel=ParallelConfig(**layout),
        data=DataConfig(
            seq_len=64,
            micro_batch_size=2,
            masked_lm=None if model.bert is None else MaskedLMConfig(mask_fraction=0.25),
        ),
        train=TrainConfig(global_batch_size=2 * microbatches * dp, dtype=dtype, **dict(train)),
    )
    return made


def world_size(made, dp=1):
    layout = made.parallel
    size = dp * layout.tp * layout.cp * layout.pp
    assert problems(made, size) == []
    return size


def make_stages(made, groups=ParallelGroups.alone()):
    layout = made.parallel
    stages = (gpt_stages if made.model.bert is None else bert_stages)(
        made.model,
        Placement(
            groups,
            sequence_parallel=layout.sequence_parallel,
            rng=RngTracker(1, tp_rank=group_rank(groups.tp)),
            dtype=getattr(torch, made.train.dtype),
            fp8=made.train.fp8(),
            recompute_kv=layout.recompute_kv,
        ),
        vpp=layout.vpp,
        layers=layout.stage_layers,
        placement=layout.placement,
        recompute=layout.recompute,
        shard_recompute_input=layout.shard_recompute_input,
    )
    return stages, make_grads(stages, made.optimizer, groups)


def batch(made):
    tokens = torch.randint(made.model.vocab_size, (2, 65), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:]
    if made.model.bert is not None:  # as many of each row as there may be
        targets = targets.masked_fill(torch.arange(64) >= made.data.predicted, -100)
    return tokens[:, :-1], targets


MAX_MASKED = 2 * recipe(MODELS["bert"]).data.predicted


def bert_loss(model, hidden, targets):
    losses = model.losses(
        hidden, targets, sentence_order_B=targets.new_zeros(2), max_masked=MAX_MASKED, loss_grad=1.0
    )
    return losses.masked.sum() + losses.sentence.sum()


def loss_of(model, tokens, targets):
    if isinstance(model, Bert):
        return bert_loss(model, model.encode(tokens, torch.zeros_like(tokens)), targets)
    return model.loss(tokens, targets, loss_grad_BS=1.0).sum()


class Kept:
    """Bytes of the distinct storages that autograd holds, of what it saves inside: now, and at most.

    Parameters and tables are left out.
    """

    def __init__(self, *modules):
        own = (t for module in modules for t in [*module.parameters(), *module.buffers()])
        self.others = {t.untyped_storage().data_ptr() for t in own}
        self.holders, self.bytes, self.most = Counter(), 0, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(t, self), lambda s: s.tensor)

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def count(self, storage, change):
        if storage.data_ptr() in self.others:
            return
        before = self.holders[storage.data_ptr()]
        self.holders[storage.data_ptr()] = before + change
        self.bytes += storage.nbytes() * ((before + change > 0) - (before > 0))
        self.most = max(self.most, self.bytes)


class _Saved:
    """A stand-in for a saved tensor, which is gone with its autograd graph."""

    def __init__(self, tensor, kept):
        self.tensor = tensor.detach()  # an output that its own node has saved would hold that node
        self.kept, self.storage = kept, tensor.untyped_storage()
        kept.count(self.storage, 1)

    def __del__(self):
        self.kept.count(self.storage, -1)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_that_autograd_keeps(name, dtype):
    made = recipe(MODELS[name], dtype=dtype)
    shapes, ([model], _) = shapes_of(made, 1), make_stages(made)
    x = torch.randn(64, 2, 128, dtype=getattr(torch, dtype), requires_grad=True)
    with Kept(model) as kept:
        out = model.layers[0](x)
    expected = sum(activations.layer_parts(shapes.of_layer(0)).values())
    assert kept.most == kept.bytes == pytest.approx(expected, rel=CLOSE)
    del out
    assert kept.bytes == 0
    with Kept(model) as kept:
        loss_of(model, *batch(made))
    held = memory(made, shapes, Schedule(1, 1).orders())[0]
    assert kept.most == pytest.approx(held.activations + on_cpu(shapes), rel=CLOSE)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", ["some dense", *full([name for name in MODELS if name not in ("some dense", "gpt-oss")])]
)
def test_bytes_that_autograd_keeps_in_fp8(name, dtype):
    made = recipe(MODELS[name], dtype=dtype, train=FP8)
    shapes, ([model], _) = shapes_of(made, 1), make_stages(made)
    x = torch.randn(64, 2, 128, dtype=getattr(torch, dtype), requires_grad=True)
    for layer, chain in enumerate(model.layers):
        with Kept(model) as kept:
            out = chain(x)
        expected = sum(activations.layer_parts(shapes.of_layer(layer)).values())
        assert kept.bytes == pytest.approx(expected, rel=CLOSE), layer
        del out


class Allocated(TorchDispatchMode):
    """The storages of all results of ops; `live` counts the bytes of those that still exist."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(made)):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return made

    @property
    def live(self):
        return sum(nbytes for storage, nbytes in self.storages.values() if not storage.expired())


@pytest.mark.parametrize("value_size", [32, pytest.param(16, marks=pytest.mark.full)])
def test_bytes_of_latents_in_place_of_keys_and_values(value_size):
    """What is made again in backward is gone after forward; gradients are bit for bit the same."""
    model = replace(OF_LATENTS, latent=replace(LATENT, value_size=value_size))
    held, planned, gradients = [], [], []
    for again in (False, True):
        shapes = shapes_of(recipe(model, recompute_kv=again), 1)
        torch.manual_seed(0)
        layer = LatentAttention(model, Placement(recompute_kv=again))
        x = torch.randn(64, 2, 128, requires_grad=True)
        with Allocated() as seen:
            output, _ = layer(x)
        held.append(seen.live)
        planned.append(activations.attention(shapes))
        output.square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(map(torch.equal, *gradients))
    head = 64 * 2 * model.num_heads * 4
    assert held[0] - held[1] == planned[0] - planned[1] > head * 32


@pytest.mark.parametrize("block", [32, 128])
def test_bytes_of_fp8_copies(block):
    model = replace(
        LLAMA, hidden_size=256, ffn_hidden_size=384, moe=replace(SHARED, expert_ffn_hidden_size=128)
    )
    model = replace(model, moe=replace(model.moe, shared_expert_ffn_hidden_size=256), dense_layers=(0,))
    made = recipe(model, dtype="bfloat16", train={"precision": "fp8", "fp8_block": block})
    shapes, ([built], _) = shapes_of(made, world_size(made)), make_stages(made)
    built.layers[0](torch.randn(64, 2, 256, dtype=torch.bfloat16))
    built.layers[1](torch.randn(64, 2, 256, dtype=torch.bfloat16))
    assert bytes_of_copies([built]) == fp8_copies(made, shapes, 0) > 0
    exact = replace(made, train=replace(made.train, precision="dtype"))
    (with_copies,), (without,) = (
        memory(each, shapes_of(each, 1), Schedule(1, 1).orders()) for each in (made, exact)
    )
    assert with_copies.weights - without.weights == fp8_copies(made, shapes, 0)


def on_cpu(shapes):
    """Return the bytes torch keeps on a CPU only: dropout's mask has the dtype of its input."""
    model = shapes.model
    return shapes.rows * model.hidden_size * (shapes.itemsize - 1) if model.dropout else 0


SMALL = OptimizerConfig(states="small", grad_dtype="bfloat16", bucket_size=5000, bucket_unit=1024)
FP8_MODEL = replace(MODELS["some dense"], moe=replace(SHARED, shared_expert_ffn_hidden_size=128))
LAYOUTS = {
    "tp": (recipe(GPT2, tp=2), 1),
    "tp, grouped": (recipe(LLAMA, tp=2), 1),
    "tp, sp": (recipe(LLAMA, tp=2, sequence_parallel=True), 1),
    "tp, sp, tied": (recipe(GPT2, tp=2, sequence_parallel=True), 1),
    "tp, etp": (recipe(MODELS["qwen"], tp=2), 1),
    "tp, sp, etp": (recipe(MODELS["shared"], tp=2, sequence_parallel=True), 1),
    "tp, ep": (recipe(MODELS["shared"], tp=2, ep=2, etp=1), 1),
    "tp, sp, ep": (recipe(MODELS["qwen"], tp=2, ep=2, etp=1, sequence_parallel=True), 1),
    "ep": (recipe(MODELS["qwen"], ep=2, dp=2), 2),
    "ep, all-gather": (recipe(replace(LLAMA, moe=replace(BALANCED, dispatcher="allgather")), ep=2, dp=2), 2),
    "ep, deepep": (recipe(replace(LLAMA, moe=replace(BALANCED, dispatcher="deepep")), ep=2, dp=2), 2),
    "ep, etp": (recipe(MODELS["qwen"], tp=2, ep=2, dp=2), 2),
    "ep, symmetric": (recipe(SYMMETRIC, ep=2, dp=2), 2),
    "ep, symmetric, without a stash": (recipe(WITHOUT_STASH, ep=2, dp=2), 2),
    "ep, etp, symmetric": (recipe(replace(LLAMA, moe=IN_BALANCE), tp=2, ep=2, dp=2), 2),
    "dp": (recipe(GPT2, dp=2), 2),
    "dp, edp": (recipe(MODELS["shared"], dp=2), 2),
    "cp": (recipe(LLAMA, cp=2), 1),
    "cp, qk-norm": (recipe(MODELS["qwen"], cp=2, ep=2), 1),
    "cp, learned": (recipe(GPT2, cp=2), 1),
    "pp": (recipe(GPT2, pp=2, microbatches=3), 1),
    "pp, mtp": (recipe(MODELS["mtp"], pp=2, microbatches=3), 1),
    "tp, sp, ep, mtp": (recipe(MODELS["mtp, experts"], tp=2, ep=2, etp=1, sequence_parallel=True), 1),
    "tp, mtp": (recipe(MODELS["mtp"], tp=2), 1),
    "mtp, muon": (recipe(MODELS["mtp"], tp=2, optimizer=OptimizerConfig(name="muon")), 1),
    "pp, vpp": (recipe(replace(LLAMA, num_layers=4), pp=2, vpp=2, microbatches=4), 1),
    "pp, uneven": (recipe(replace(GPT2, num_layers=3), pp=2, stage_layers=(1, 2), microbatches=2), 1),
    "pp, on a v": (
        recipe(replace(GPT2, num_layers=4), pp=2, vpp=2, microbatches=5, schedule="dualpipe_v"),
        1,
    ),
    "small, ep": (recipe(MODELS["qwen"], dtype="bfloat16", ep=2, dp=2, optimizer=SMALL), 2),
    "small, edp": (recipe(MODELS["shared"], dtype="bfloat16", dp=2, optimizer=SMALL), 2),
    "replicated": (recipe(MODELS["shared"], dp=2, optimizer=OptimizerConfig(shard=False)), 2),
    "muon": (recipe(MODELS["shared"], tp=2, dp=2, optimizer=OptimizerConfig(name="muon")), 2),
    "tp, some dense": (recipe(MODELS["some dense"], tp=2, dp=2), 2),
    "pp, some dense": (recipe(MODELS["some dense"], pp=2, microbatches=2), 1),
    "muon, some dense": (
        recipe(
            replace(MODELS["some dense"], num_layers=4, dense_layers=(0, 2)),
            **{"tp": 2, "dp": 2, "optimizer": OptimizerConfig(name="muon")},
        ),
        2,
    ),
    "fp8, tp, sp": (
        recipe(FP8_MODEL, tp=2, sequence_parallel=True, etp=1, ep=2, train=FP8),
        1,
    ),
    "fp8, ep": (recipe(MODELS["shared"], dtype="bfloat16", ep=2, dp=2, train=FP8), 2),
    "fp8, dp": (recipe(FP8_MODEL, dtype="bfloat16", dp=2, train=FP8), 2),
    "fp8, dp, float32, small buckets": (
        recipe(FP8_MODEL, dp=2, train=FP8, optimizer=replace(CLASSIC, bucket_size=5000, bucket_unit=1)),
        2,
    ),
    "latent, keys again": (recipe(MODELS["latent"], tp=2, sequence_parallel=True, recompute_kv=True), 1),
    "latent, tp": (recipe(MODELS["latent"], tp=2, dp=2), 2),
    "latent, tp, sp": (recipe(MODELS["latent"], tp=2, sequence_parallel=True), 1),
    "latent, cp": (recipe(MODELS["latent"], cp=2), 1),
    "latent, tp, cp": (recipe(OF_LATENTS, tp=2, cp=2), 1),
    "latent, tp, sp, cp": (recipe(OF_LATENTS, tp=2, cp=2, sequence_parallel=True), 1),
    "latent, direct, tp": (recipe(MODELS["latent, direct queries"], tp=2), 1),
    "latent, direct, tp, sp": (recipe(MODELS["latent, direct queries"], tp=2, sequence_parallel=True), 1),
    "latent, muon": (recipe(OF_LATENTS, tp=2, optimizer=OptimizerConfig(name="muon")), 1),
    "latent, fp8": (recipe(OF_LATENTS, tp=2, sequence_parallel=True, train=FP8), 1),
    "sinks, tp, sp": (recipe(MODELS["sinks"], tp=2, sequence_parallel=True), 1),
    "gpt-oss, tp, sp, etp": (recipe(MODELS["gpt-oss"], tp=2, sequence_parallel=True), 1),
    "gpt-oss, ep, muon": (
        recipe(MODELS["gpt-oss"], ep=2, dp=2, optimizer=OptimizerConfig(name="muon")),
        2,
    ),
    "bert, tp": (recipe(MODELS["bert"], tp=2), 1),
    "bert, tp, sp": (recipe(MODELS["bert, post-norm"], tp=2, sequence_parallel=True), 1),
    "bert, pp": (recipe(MODELS["bert"], pp=2, microbatches=2), 1),
    "tp, sp, pp": (
        recipe(MODELS["qwen"], dtype="bfloat16", tp=2, pp=2, sequence_parallel=True, microbatches=2),
        1,
    ),
}
RECOMPUTED = {
    "tp": (recipe(GPT2, tp=2, recompute=True), 1),
    "tp, dropout": (recipe(MODELS["gpt2, dropout"], tp=2, recompute=True), 1),
    "tp, shards": (recipe(LLAMA, tp=2, recompute=True, shard_recompute_input=True), 1),
    "tp, sp": (recipe(LLAMA, tp=2, recompute=True, sequence_parallel=True), 1),
    "tp, etp": (recipe(MODELS["shared"], tp=2, recompute=True), 1),
    "ep": (recipe(MODELS["qwen"], ep=2, dp=2, recompute=True), 2),
    "fp8, ep": (recipe(MODELS["qwen"], ep=2, dp=2, recompute=True, train=FP8), 2),
    "ep, symmetric": (recipe(SYMMETRIC, ep=2, dp=2, recompute=True), 2),
    "ep, all-gather": (
        recipe(replace(LLAMA, moe=replace(BALANCED, dispatcher="allgather")), ep=2, dp=2, recompute=True),
        2,
    ),
    "ep, deepep": (
        recipe(replace(LLAMA, moe=replace(BALANCED, dispatcher="deepep")), ep=2, dp=2, recompute=True),
        2,
    ),
    "cp": (recipe(LLAMA, cp=2, recompute=True), 1),
    "tp, some dense": (recipe(MODELS["some dense"], tp=2, recompute=True), 1),
    "latent": (recipe(MODELS["latent"], tp=2, recompute=True), 1),
    "bert": (recipe(MODELS["bert, post-norm"], tp=2, recompute=True), 1),
}
ALL = LAYOUTS | {f"recomputed: {name}": case for name, case in RECOMPUTED.items()}
QUICK = {
    *(
        "ep, symmetric",
        "dp, edp",
        "cp, qk-norm",
        "pp, vpp",
        "tp, sp, pp",
        *("fp8, tp, sp", "fp8, dp"),
        "latent, tp, sp",
        "muon",
    ),
    *("recomputed: ep", "recomputed: tp, shards"),
}
CASES = [
    pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.full)
    for name, case in ALL.items()
]


def bytes_sent(seen):
    """By groups of two ranks, as rings."""
    factors = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 0.5, "send": 1.0}
    sent = Counter()
    for (name, _), size in zip(seen.calls, seen.sizes):
        if size > SMALL_CALL and name in factors:
            sent[name] += factors[name] * size
    return dict(sent)


def run_step(rank, size, made):
    """Bytes sent in a step, most bytes kept for backward at a time, and bytes that this rank holds."""
    deep_ep_stand_in.install()
    groups = ParallelGroups.create(make_grid(made, size))
    stages, buffer = make_stages(made, groups)
    shapes = shapes_of(made, size)
    tokens, targets = (cut_sequence(x, groups.cp) for x in batch(made))
    stash = None
    if shapes.grid.pp == 1:
        alone = MicrobatchRunner(stages[:1], loss_of, num_microbatches=shapes.num_microbatches)
        stash = attach_stash(alone, groups)
    optimizer = make_optimizer(buffer, made.optimizer, groups)  # which moves the parameters
    kept = Kept(*stages)
    with count_collectives() as seen:
        if shapes.grid.pp == 1:
            with kept:
                loss = loss_of(stages[0], tokens, targets)
            loss.backward()
        else:
            with kept:
                run_pipeline(made, shapes, groups, stages, tokens, targets)
        buffer.reduce()
        sum_tied_gradients(stages, groups, buffer)
        optimizer.step()
    state = optimizer.state_dict()["state"].values()
    held = {
        "weights": bytes_of(buffer.parameters.values()) + bytes_of_copies(stages),
        "gradients": bytes_of(p.main_grad for p in buffer.parameters.values()),
        "optimizer": bytes_of(tensor for entries in state for tensor in entries.values()),
        "exchange": bytes_of(
            []
            if groups.exchange is None or groups.exchange.memory is None
            else [groups.exchange.memory.local]
        ),
        "stash": 0 if stash is None else stash.nbytes,
    }
    facts, copies = {}, quantized_weights(stages)
    for name, param in buffer.parameters.items():
        cost = update_cost(name, param, tp_group=groups.tp, etp_group=groups.etp)
        whole = cost if made.optimizer.name == "muon" else 0
        facts[name] = param_spec(param, groups.tp, whole, copies.get(param))
    return bytes_sent(seen), kept.most, held, facts


def bytes_of(tensors):
    """Return the bytes of the memory in which the tensors lie."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def bytes_of_copies(stages):
    """Return the bytes of the FP8 copies of weights, and of the flat buffers that they are views of."""
    return bytes_of(tensor for copies in quantized_weights(stages).values() for tensor in copies.tensors)


def run_pipeline(made, shapes, groups, stages, tokens, targets):
    last, encoder = stages[-1], made.model.bert is not None

    def loss(hidden, *states_and_item):
        *states, item = states_and_item
        if encoder:
            return bert_loss(last, hidden, item[1])
        total = last.token_losses(hidden, item[1], loss_grad_BS=1.0).sum()
        ahead = last.mtp_loss(states, FutureTokens.of(*item, made.model), loss_grad_BS=1.0) if states else 0.0
        return total + ahead

    def shared(item):
        return {"tokens_DBS": FutureTokens.of(*item, made.model).tokens} if made.model.mtp_depth else {}

    pipeline = Pipeline(
        stages,
        make_schedule(made.parallel, shapes.num_microbatches).orders(),
        placement=made.parallel.placement,
        group=groups.pp,
        inputs=lambda item: (item[0], torch.zeros_like(item[0])) if encoder else item[0],
        loss=loss,
        shared=shared,
    )
    pipeline.train([(tokens, targets)] * shapes.num_microbatches)


@pytest.mark.parametrize(("made", "dp"), CASES)
def test_bytes_on_ranks(made, dp):
    size = world_size(made, dp)
    shapes, layout = shapes_of(made, size), made.parallel
    results = run_ranks(run_step, size, made)
    expected = traffic.step(made, shapes)
    adamw = traffic.step(replace(made, optimizer=OptimizerConfig()), shapes)
    held = memory(made, shapes, make_schedule(layout, shapes.num_microbatches).orders())
    for rank, (sent, kept, owned, facts) in enumerate(results):
        stage = rank // (size // layout.pp)
        assert list(facts.items()) == list(rank_parameters(made, shapes, stage).items())
        ring = owned.pop("stash")
        assert ring == (0 if layout.recompute else held[stage].stash)
        assert owned == {name: getattr(held[stage], name) for name in owned}
        planned, total = sum(expected[stage].values()), sum(sent.values())
        if shapes.exchange is not None:  # stores and loads, which are no collectives
            planned -= expected[stage]["etp-ep"]
        if made.optimizer.name == "muon":  # ranks have unequal owners; on a CPU they exchange float32
            planned += planned - sum(adamw[stage].values())
            total = sum(sum(sent.values()) for sent, *_ in results) / size
        assert total == pytest.approx(planned, rel=CLOSE), sent
        if layout.recompute_kv:  # which keeps tensors out of sight
            continue
        whole = held[stage].activations - ring  # where autograd keeps nothing
        if layout.recompute:  # what is kept while a layer runs again, a checkpoint hides
            layers = map(shapes.of_layer, range(made.model.num_layers))
            parts = (activations.layer_parts(layer, recomputed=True) for layer in layers)
            whole = held[stage].recomputed - max(sum(each.values()) for each in parts)
            whole += 0 if layout.shard_recompute_input else activations.layer_input(shapes, False)
        assert kept == pytest.approx(whole + on_cpu(shapes), rel=CLOSE)


@pytest.mark.parametrize(("num_experts", "top_k", "ep", "etp"), [(6, 2, 3, 1), (8, 3, 2, 2), (4, 3, 2, 1)])
def test_deepep_sends_a_token_to_each_rank_of_its_experts_once(num_experts, top_k, ep, etp):
    moe = MoEConfig(num_experts=num_experts, top_k=top_k, expert_ffn_hidden_size=8, dispatcher="deepep")
    made = recipe(replace(LLAMA, moe=moe), tp=etp, ep=ep, dp=ep)
    shapes, local = shapes_of(made, ep * etp), num_experts // ep
    choices = list(combinations(range(num_experts), top_k))
    reached = sum(len({expert // local for expert in chosen}) for chosen in choices) / len(choices)
    assert shapes.dispatch_sizes.reached == pytest.approx(reached * etp)
    row, choice = shapes.model.hidden_size * shapes.itemsize, 8 + 4  # an int64, a float32
    away = shapes.routed * reached * etp * (1 - 1 / (ep * etp))
    found = traffic.layer(shapes)
    assert found.forward["etp-ep"] == pytest.approx(away * (2 * row + top_k * etp * choice), abs=2)
    assert found.backward["etp-ep"] == pytest.approx(away * (2 * row + top_k * etp * 4), abs=2)


@pytest.mark.parametrize(("num_groups", "group_topk"), [(1, 1), (2, 1), (4, 2), (4, 4), (12, 5)])
@pytest.mark.parametrize("parts", [1, 2, 4, 12])
def test_parts_that_a_token_reaches_are_the_mean_over_all_choices(parts, num_groups, group_topk):
    """Parts of several groups, of one, and of a share of one; groups are chosen first, then experts."""
    group, top_k = 12 // num_groups, 3
    counts = [
        len({expert // (12 // parts) for expert in chosen})
        for opened in combinations(range(num_groups), group_topk)
        for chosen in combinations([expert for expert in range(12) if expert // group in opened], top_k)
    ]
    moe = MoEConfig(
        num_experts=12, top_k=top_k, expert_ffn_hidden_size=8, num_groups=num_groups, group_topk=group_topk
    )
    sizes = shapes_of(recipe(replace(LLAMA, moe=moe), ep=2, dp=2), 2).dispatch_sizes
    assert sizes.parts_reached(parts) == pytest.approx(sum(counts) / len(counts))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_follow_the_schedule(schedule):
    """The fullest moment holds as many of the equal chunks as the schedule says."""
    made = recipe(replace(GPT2, num_layers=24), pp=4, vpp=2, microbatches=8, schedule=schedule)
    planned = Schedule(4, 8, 2, name=schedule)
    shapes = shapes_of(made, 4)
    layer = sum(activations.layer_parts(shapes).values())
    ends = dict.fromkeys((0, planned.stages.rank(7)), 0)
    ends[0] += activations.embedding(shapes)
    ends[planned.stages.rank(7)] += activations.loss(shapes)
    for rank, held in enumerate(memory(made, shapes, planned.orders())):
        chunks = planned.peak_in_flight(rank)
        assert 0 <= held.activations - chunks * 3 * layer <= chunks * ends.get(rank, 0)
        if schedule == "1f1b":
            most = chunks * (3 * activations.layer_input(shapes, False) + ends.get(rank, 0)) + layer
            assert held.recomputed <= most < held.activations
    last = memory(
        recipe(GPT2, pp=2, stage_layers=(2, 0), microbatches=4), shapes_of(made, 4), Schedule(2, 4).orders()
    )[1]
    assert last.activations == activations.loss(shapes)


QUICK_PRODUCTS = {
    ("gpt2, dropout", True, "1f1b"),
    ("llama", False, "zero_bubble"),
    ("qwen", True, "1f1b"),
    ("shared", True, "zero_bubble"),
}


@pytest.mark.parametrize(
    ("name", "recompute", "schedule"),
    [
        pytest.param(*case, marks=() if case in QUICK_PRODUCTS else pytest.mark.full)
        for case in product(
            (
                *("gpt2", "gpt2, dropout", "llama", "qwen", "shared"),
                *("some dense", "mtp", "bert", "bert, post-norm"),
            ),
            (False, True),
            ("1f1b", "zero_bubble"),
        )
    ],
)
def test_products(name, recompute, schedule):
    made = recipe(MODELS[name], recompute=recompute, schedule=schedule)
    [model], _ = make_stages(made)
    # A counter sees into attention that is not fused; that keeps its scores, and does not make them again.
    queue = WgradQueue() if schedule == "zero_bubble" else None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        with defer_wgrad(queue):
            loss_of(model, *batch(made)).backward()
        if queue is not None:
            queue.run(queue.take())
    products = ("mm", "addmm", "bmm", "grouped_mm", "grouped_mlp_in", "grouped_mm_wgrad", "grouped_mm_wgrad_",
                "accumulate_weight_grad_")  # fmt: skip
    counts = counter.get_flop_counts()["Global"]
    counted = sum(count for op, count in counts.items() if op.__name__ in products)
    attention = layer_flops_per_token(made.model, 64)[1] * (made.model.num_layers + made.model.mtp_depth)
    expected = hardware_flops(made, shapes_of(made, 1), causal=False)[0] - 128 * 0.5 * attention
    assert counted == pytest.approx(expected, rel=1e-9)
