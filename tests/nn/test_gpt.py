"""GPT: sizes and FLOPs by formula, initial weights equal at every TP, and what it refuses."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dispatch_modes import CalledOps
from nn_tools import text, tp_groups
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fastmp.config import NORMS, GPTConfig, MoEConfig, RopeScaling
from fastmp.config.recipe import load_recipe
from fastmp.config.sizes import count_parameters, mtp_parameters
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Bert, Placement, flops_per_token, num_parameters, pad_vocab
from fastmp.testing.ranks import run_ranks
from tools.small_models import EXPERTS, QWEN, SEED, SMALL, make_gpt, part_of

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("tp, padded", ((1, 50_304), (2, 50_432), (4, 50_688), (8, 51_200)))
def test_the_gpt2_vocabulary_is_padded_to_128_times_tp(tp, padded):
    assert pad_vocab(50_257, tp) == padded
    assert pad_vocab(padded, tp) == padded


def test_sizes_that_cannot_be_padded_are_refused():
    with pytest.raises(ValueError, match="pad_vocab: sizes must be positive, got vocab_size 0, tp 2"):
        pad_vocab(0, 2)


@pytest.mark.parametrize(
    "base",
    (SMALL, QWEN, EXPERTS, replace(SMALL, moe=EXPERTS.moe), replace(SMALL, moe=MoEConfig())),
    ids=("gpt", "qwen", "experts", "gpt-experts", "gpt-no-shared-expert"),
)
@pytest.mark.parametrize("kv_heads, ffn", ((None, None), (4, 96), (1, 40)))
def test_the_formula_counts_the_model(kv_heads, ffn, base):
    config = replace(base, num_kv_heads=kv_heads, ffn_hidden_size=ffn)
    model = GPT(config, Placement(device="meta"))
    assert sum(param.numel() for param in model.parameters()) == num_parameters(config, pad_vocab(131, 1))


def test_ranks_share_the_parameters_of_the_formula():
    def case(rank, world):
        model = make_gpt(SMALL, tp_groups(world))
        return sum(param.numel() for param in model.parameters() if param.tensor_model_parallel or rank == 0)

    assert sum(run_ranks(case, 2)) == num_parameters(SMALL, pad_vocab(131, 2))


SOME_DENSE = replace(EXPERTS, dense_layers=(0,), qkv_bias=True)


@pytest.mark.parametrize("config", (SMALL, EXPERTS, SOME_DENSE), ids=("gpt", "experts", "some dense"))
@pytest.mark.parametrize("ep, etp", ((2, 1), (1, 2)))
def test_the_formula_counts_what_a_rank_holds(config, ep, etp):
    def case(rank, world):
        sizes = Counter()
        for param in make_gpt(config, tp_groups(world, ep=ep, etp=etp)).parameters():
            sizes[getattr(param, "expert_parallel", False)] += param.numel()
        return sizes[True], sizes[False]

    count = count_parameters(config, pad_vocab(131, 2))
    expected = count.experts // (ep * etp), count.sharded // 2 + count.replicated
    assert run_ranks(case, 2) == [expected] * 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_model_of_a_recipe_can_be_made(path):
    config = load_recipe(path).model
    config = replace(config, vocab_size=config.vocab_size or 257)  # 0: that of the data
    kind = GPT if config.bert is None else Bert
    layers = max((-1, *config.dense_layers)) + 2  # one without experts, if there is any, and one with them
    few = replace(config, num_layers=layers, full_attention_layers=())
    model = kind(few, Placement(device="meta", dtype=torch.bfloat16))
    padded = pad_vocab(config.vocab_size, 1)
    total = num_parameters(model.config, padded) + mtp_parameters(model.config).total
    assert sum(param.numel() for param in model.parameters()) == total


@pytest.mark.parametrize(
    "base", (SMALL, QWEN, EXPERTS, SOME_DENSE), ids=("gpt", "qwen", "experts", "some dense")
)
@pytest.mark.parametrize(
    "kv_heads, ffn, seq_len", ((4, 96, 20), pytest.param(None, None, 16, marks=pytest.mark.full))
)
def test_flops_are_what_torch_counts(kv_heads, ffn, seq_len, base):
    """The counter has no formula for the CPU's fused attention, so attention runs as two products here."""
    config = replace(base, num_kv_heads=kv_heads, ffn_hidden_size=ffn, vocab_size=256)
    model, (tokens_BS, targets_BS) = make_gpt(config, dtype=torch.float32), text(config, sequence=seq_len)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model.loss(tokens_BS, targets_BS)
        (loss if config.moe is None else loss.tokens).mean().backward()
    grouped = ("grouped_mlp_in", "grouped_mlp_in_backward", "grouped_mm", "grouped_mm_wgrad")
    products = ("mm", "bmm", "addmm", "baddbmm", *grouped)
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in products
    )
    assert counted == tokens_BS.numel() * flops_per_token(config, seq_len)


def test_flops_of_causal_attention_count_the_keys_that_are_seen():
    keys = [position + 1 for position in range(SMALL.max_seq_len)]
    saved = SMALL.max_seq_len - sum(keys) / len(keys)
    difference = flops_per_token(SMALL) - flops_per_token(SMALL, causal=True)
    assert difference == 3 * SMALL.num_layers * 4 * SMALL.hidden_size * saved


@pytest.mark.parametrize(
    "config, size",
    ((SMALL, 2 + 12 * 2 + 2), (QWEN, 1 + 8 * 2 + 2), (EXPERTS, 1 + 12 * 2 + 2)),
    ids=("gpt", "qwen", "experts"),
)
@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_full_initialisation_is_bitwise_the_same_at_every_tp(tp, config, size):
    def case(rank, world):
        groups = tp_groups(tp, ep=2, etp=tp // 2)
        one, many = make_gpt(config), make_gpt(config, groups)
        assert len(list(one.parameters())) == len(list(many.parameters())) == size
        for (name, full), param in zip(one.named_parameters(), many.parameters()):
            assert torch.equal(part_of(full, param, groups), param), name

    run_ranks(case, tp)


def test_a_bf16_model_starts_from_the_float32_weights():
    pairs = zip(
        *(make_gpt(SMALL, dtype=dtype).named_parameters() for dtype in (torch.float32, torch.bfloat16))
    )
    for (name, full), (_, half) in pairs:
        assert half.dtype == torch.bfloat16 and torch.equal(full.bfloat16(), half), name


@pytest.mark.parametrize("init", ("full", "sharded"))
def test_the_spread_of_initial_weights(init):
    config = GPTConfig(num_layers=8, hidden_size=128, num_heads=4, vocab_size=300, max_seq_len=64)

    def case(rank, world):
        model = make_gpt(config, tp_groups(world), torch.float32, init=init)
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                assert not param.any(), name
            elif "norm" in name:
                assert (param == 1).all(), name
            else:
                rows = param[: max(config.vocab_size - rank * 256, 0)] if "word" in name else param
                std = 0.02 / 4 if name.endswith(("proj.weight", "down.weight")) else 0.02
                assert abs(rows.std() / std - 1) < 0.03 and abs(rows.mean()) < 0.02 * std * 5, name
        assert not model.word_embedding.weight[max(config.vocab_size - rank * 256, 0) :].any()
        return model.layers[0].mlp.up.weight.detach(), model.position_embedding.weight.detach()

    (first, positions), (second, positions1) = run_ranks(case, 2)
    assert not torch.equal(first, second) and torch.equal(positions, positions1)


def test_embeddings_are_tied():
    model = make_gpt(SMALL)
    names = [name for name, param in model.named_parameters() if param.shape[0] == pad_vocab(131, 1)]
    assert names == ["word_embedding.weight"]
    tokens_BS, targets_BS = text(SMALL)
    (grad,) = torch.autograd.grad(model.loss(tokens_BS, targets_BS).sum(), [model.word_embedding.weight])
    assert grad[:131].ne(0).all() and not grad[131:].any()  # every row is scored; padding is never reached


def test_an_untied_output_layer_has_a_weight_of_its_own():
    model, (tokens_BS, targets_BS) = make_gpt(QWEN), text(QWEN)
    words, output = model.word_embedding.weight, model.output_layer.weight
    assert not torch.equal(words, output) and not output[131:].any()
    model.loss(tokens_BS, targets_BS).sum().backward()
    seen = torch.zeros(len(words), dtype=torch.bool).index_fill(0, tokens_BS.flatten(), True)
    assert torch.equal(words.grad.ne(0).any(1), seen)
    assert output.grad[:131].ne(0).all() and not output.grad[131:].any()


def test_a_model_with_experts_returns_their_losses_and_loads_beside_its_own():
    model, (tokens_BS, targets_BS) = make_gpt(EXPERTS), text(EXPERTS)
    loss = model.loss(tokens_BS, targets_BS)
    L, E, k = EXPERTS.num_layers, EXPERTS.moe.num_experts, EXPERTS.moe.top_k
    assert loss.counts.shape == (L, E) and loss.counts.dtype == torch.int32
    assert (loss.counts.sum(1) == k * tokens_BS.numel()).all()
    logits_SBV = model(tokens_BS)[..., : EXPERTS.vocab_size]
    expected = torch.nn.functional.cross_entropy(logits_SBV.permute(1, 2, 0), targets_BS, reduction="none")
    torch.testing.assert_close(loss.tokens, expected, **CLOSE)
    assert loss.aux.shape == () and loss.aux > 0
    model.eval()
    without = model.loss(tokens_BS, targets_BS)
    assert without.aux == 0 and torch.equal(without.counts, loss.counts)
    assert torch.equal(without.tokens, loss.tokens)


def test_hidden_dropout_is_the_same_at_every_tp():
    """It acts on replicas, so it draws from the stream that TP ranks share."""
    config = replace(SMALL, dropout=0.3)

    def case(rank, world):
        losses = []
        for groups in (ParallelGroups.alone(), tp_groups(world)):
            model = make_gpt(config, groups)
            RngTracker(SEED + 1, tp_rank=rank)
            losses.append(model.loss(*text(config)))
        without = model.eval().loss(*text(config))
        torch.testing.assert_close(losses[0], losses[1], **CLOSE)
        assert (losses[1] - without).abs().min() > 1e-4
        assert torch.equal(without, model.loss(*text(config)))

    run_ranks(case, 2)


def test_a_copy_drops_out_as_its_model_does():
    """Its shards differ between ranks as well: it draws from the same streams, not from copies of them."""

    def case(rank, world):
        model = make_gpt(replace(SMALL, attention_dropout=0.3), tp_groups(world))
        twin, start = copy.deepcopy(model), model.rng.states()
        tokens_BS, _ = text(SMALL)
        expected = model(tokens_BS)
        model.rng.restore(start)
        assert torch.equal(twin(tokens_BS), expected)
        assert twin.rng is model.rng and twin.group is model.group

    run_ranks(case, 2)


def test_the_sum_of_the_embeddings_is_dropped_out():
    model, (tokens_BS, _) = make_gpt(replace(SMALL, dropout=0.3)), text(SMALL)
    dropped = model.embed(tokens_BS).eq(0).double().mean()
    assert abs(dropped - 0.3) < 0.05 and model.eval().embed(tokens_BS).ne(0).all()


def test_the_whole_model_calls_one_op_where_one_is_enough():
    model, losses = make_gpt(SMALL), ["stats", "merge", "grad_"]
    layers = {
        "bias_dropout_add": 4,
        "bias_gelu": 2,
        "bias_gelu_backward": 2,
        "layer_norm": 5,
        "layer_norm_backward": 5,
    }
    for upstream, parts in (({}, losses), ({"loss_grad_BS": 1.0}, ["loss_grad_"])):
        with CalledOps() as calls:
            model.loss(*text(SMALL), **upstream).sum().backward()
        assert Counter(calls.names) == layers | {f"cross_entropy_{part}": 1 for part in parts}


def test_loss_options_reach_the_loss():
    model, (tokens_BS, targets_BS) = make_gpt(SMALL), text(SMALL)
    targets_BS = targets_BS.clone()
    targets_BS[1, 3:6] = -1
    weight_BS = torch.rand(targets_BS.shape, dtype=torch.float64)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": -1}
    loss_BS = model.loss(tokens_BS, targets_BS, token_weight_BS=weight_BS, **options)
    logits_BSV = model(tokens_BS)[..., :131].transpose(0, 1)
    lse_BS = logits_BSV.logsumexp(-1)
    expected = torch.nn.functional.cross_entropy(
        logits_BSV.transpose(1, 2), targets_BS, ignore_index=-1, label_smoothing=0.1, reduction="none"
    )
    expected = torch.where(targets_BS == -1, 0.0, expected + 1e-2 * lse_BS**2) * weight_BS
    torch.testing.assert_close(loss_BS, expected, **CLOSE)


@pytest.mark.parametrize(
    "tokens, message",
    (
        (torch.zeros(2, 21, dtype=torch.int64), "a sequence of 21 tokens is longer than max_seq_len 20"),
        (torch.full((2, 4), 131), "token id 131 is outside the vocabulary of 131"),
        (torch.full((2, 4), -1), "token id -1 is outside the vocabulary of 131"),
        (
            torch.zeros(4, dtype=torch.int64),
            r"tokens must be integers \(batch, sequence\), got torch.int64 of shape \(4,\)",
        ),
    ),
)
def test_tokens_that_do_not_fit_are_refused(tokens, message):
    with pytest.raises(ValueError, match=f"GPT: {message}"):
        make_gpt(SMALL)(tokens)


def test_options_that_contradict_each_other_are_refused():
    for recompute, sequence_parallel in ((False, False), (True, True)):
        with pytest.raises(
            ValueError, match="shard_recompute_input=True needs recompute=True and sequence_parallel=False"
        ):
            on = Placement(sequence_parallel=sequence_parallel)
            GPT(SMALL, on, recompute=recompute, shard_recompute_input=True)


def test_a_sequence_that_tp_does_not_divide_is_not_supported():
    def case(rank, world):
        fits = replace(SMALL, hidden_size=48, num_heads=6, num_kv_heads=3)
        with pytest.raises(
            ValueError, match="a sequence of 16 tokens must be divisible by the tensor-parallel size 3"
        ):
            make_gpt(fits, tp_groups(world), sequence_parallel=True)(text(fits)[0])

    run_ranks(case, 3)


@pytest.mark.parametrize(
    "fields, message",
    (
        ({"hidden_size": 34}, "hidden_size 34 is not divisible by num_heads 8"),
        ({"num_kv_heads": 3}, "num_heads 8 is not divisible by num_kv_heads 3"),
        ({"vocab_size": -1}, "vocab_size must not be negative, got -1"),
        ({"num_kv_heads": 0}, "num_kv_heads must be positive, got 0"),
        ({"init_std": -0.1}, "init_std must be positive, got -0.1"),
        ({"head_size": 0}, "head_size must be positive, got 0"),
        ({"rope_base": 0.0}, "rope_base must be positive, got 0.0"),
        ({"norm": "rms"}, f"norm must be one of {', '.join(NORMS)}, got 'rms'"),
        (
            {"dense_layers": (0,)},
            "dense_layers are those not with experts where others are, but moe is absent",
        ),
        ({"moe": EXPERTS.moe, "dense_layers": (2,)}, "dense_layers must be numbers from 0 to 1 in ascending"),
        (
            {"moe": EXPERTS.moe, "dense_layers": (0, 1)},
            "dense_layers must leave a layer with experts, got",
        ),
        (
            {"full_attention_layers": (0,)},
            "full_attention_layers are those not with a window where others are, but sliding_window is",
        ),
        (
            {"sliding_window": 5, "full_attention_layers": (0, 1)},
            "full_attention_layers must leave a layer with a window, got all 2",
        ),
        ({"rope_scaling": RopeScaling()}, "rope_scaling needs position \"rope\", got 'learned'"),
        ({"position": "rope", "head_size": 5}, 'position "rope" needs heads of even size, got 5'),
    ),
)
def test_a_config_that_does_not_fit_together_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"GPTConfig: {message}"):
        replace(SMALL, **fields)
