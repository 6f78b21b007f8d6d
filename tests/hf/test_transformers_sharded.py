"""`fastmp.accelerate(model, group=...)`: ranks that divide a model of transformers compute the same."""

from __future__ import annotations

import copy
import json
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hf_models import CONFIGS, Float64, batch_of, model_of, step, tp_model, whole_gradients
from marks import full
from safetensors import safe_open
from torch.nn.parallel import DistributedDataParallel

import fastmp
from fastmp.hf import acceleration, tp_plan
from fastmp.hf.tp_modules import ColumnParallel, PerHeadNorm, RowParallel
from fastmp.hf.tp_plan import clip_grad_norm_, whole_state_dict
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)

MOST = ["llama", "qwen3_moe"]


def kinds(model):
    """The class of every module, and what it says of its own sizes."""
    names = ("num_experts", "nf", "split_size", "group", "shard_attributes")
    return [(type(module), [vars(module).get(name) for name in names]) for module in model.modules()]


def assert_divided_is_whole(family, ranks, given=None, **options):
    """Losses, logits and gradients of ranks that divide a model; restored, it has its weights again."""
    batch, reference = {**batch_of(family), **(given or {})}, model_of(family, torch.float64, **options)
    with Float64():
        expected, wanted = step(reference, **batch)
        logits = reference.eval()(input_ids=batch["input_ids"]).logits.detach()
    largest = max(grad.abs().max() for grad in wanted.values())

    def run(rank, world_size):
        model = model_of(family, torch.float64, **options)
        weights = copy.deepcopy(model.state_dict())
        before = kinds(model)
        table = fastmp.accelerate(model, group=dist.group.WORLD)
        assert list(model.state_dict()) == list(weights)
        with Float64():
            output = model(**batch)
            output.loss.backward()
            # reading lazy logits on one rank alone would hang
            assert output.logits is None and abs(output.loss - expected.loss) <= 1e-9 * expected.loss
            found = model.eval()(input_ids=batch["input_ids"]).logits
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-9)
        grads = whole_gradients(model, dist.group.WORLD)
        assert grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert (grads[name] - grad).abs().max() <= 1e-9 * largest, name
        numbers = sum(parameter.numel() for parameter in model.parameters())
        fastmp.restore(model.train())
        assert kinds(model) == before
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, weights[name]), name
        assert not any(hasattr(parameter, "tensor_model_parallel") for parameter in model.parameters())
        return str(table), numbers / sum(parameter.numel() for parameter in model.parameters())

    results = run_ranks(run, ranks)
    assert len(set(results)) == 1  # also the same parts
    return results[0]


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *full(family for family in CONFIGS if family != "qwen3_moe")]
)
def test_two_ranks_compute_what_the_whole_model_computes(family):
    table, share = assert_divided_is_whole(family, 2)
    assert "sharded over 2 ranks" in table and share < 0.8  # tables of positions, norms and routers are whole


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
def test_four_ranks_and_a_vocabulary_that_they_do_not_divide(family):
    """Zeros fill the last parts; GPT-2's 50257 ids are divided by no number of ranks."""
    options = {"vocab_size": 130}
    if family not in ("gpt2", "bert"):
        options["num_key_value_heads"] = 4
    if family == "bert":
        options["pad_token_id"] = 129  # a row without a gradient, of the last rank
    _, share = assert_divided_is_whole(family, 4, **options)
    assert share < 0.65


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"hidden_act": "relu"}),  # its MLP is transformers' own
        ("llama", {"attn_implementation": "eager"}),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
        ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
        ("mixtral", {"output_router_logits": False}),
    ],
    ids=str,
)
def test_other_models_of_a_family(family, options):
    assert_divided_is_whole(family, 2, **options)


MASK = torch.ones(2, 16, dtype=torch.int64).index_fill_(1, torch.arange(13, 16), 0)
PACKED = torch.cat([torch.arange(10), torch.arange(6)]).expand(2, -1)


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [{"position_ids": PACKED}, {"attention_mask": MASK}, {"num_items_in_batch": 17}, {"shift_labels": MASK}],
    ids=lambda given: "-".join(given),
)
def test_batches_of_all_kinds(given):
    """Packed documents, padding, and how losses are counted."""
    assert_divided_is_whole("qwen3_moe", 2, given)


@pytest.mark.full
def test_the_table_names_what_is_divided_and_what_is_whole():
    def run(rank, world_size):
        table = fastmp.accelerate(model := model_of("qwen3_moe"), group=dist.group.WORLD)
        assert fastmp.accelerate(model, group=dist.group.WORLD) is table and fastmp.accelerate(model) is table
        assert table.sharded["Qwen3MoeExperts"] == "experts" and table.sharded["lm_head"] == "vocabulary"
        assert "Qwen3MoeTopKRouter        1  replicated" in str(table)
        alone = fastmp.accelerate(
            model_of("llama"), group=dist.new_group([rank], use_local_synchronization=True)
        )
        assert not alone.sharded

    run_ranks(run, 2)


@pytest.mark.full
def test_collectives_of_a_step():
    """One sum for a region, each way: two in a layer; one for the embedding, one for the head's input."""

    def run(rank, world_size):
        model, batch = tp_model("llama"), batch_of("llama")
        model(**batch)  # the first call also compares the ranks' tokens
        with count_collectives() as forward:
            loss = model(**batch).loss
        with count_collectives() as backward:
            loss.backward()
        return forward.counts, backward.counts

    (forward, backward), _ = run_ranks(run, 2)
    layers = 2
    assert forward.pop("all_reduce") + backward.pop("all_reduce") == 2 * layers + 1 + 2 * layers + 1
    assert sum(forward.values()) + sum(backward.values()) == 1  # statistics of the loss


def rms(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors]).square().mean().sqrt()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("mixtral", {"num_experts_per_tok": 4, "output_router_logits": False})],
)
def test_in_bfloat16_errors_are_those_of_transformers(family, options):
    """Against float64; all experts are chosen, for a flipped choice is no rounding."""
    batch, model = batch_of(family, 4, 64), model_of(family, torch.bfloat16, **options)
    with Float64():
        _, true = step(copy.deepcopy(model).double(), **batch)
    _, theirs = step(model, **batch)

    def run(rank, world_size):
        model = tp_model(family, torch.bfloat16, **options)
        step(model, **batch)
        return whole_gradients(model, dist.group.WORLD)

    ours = run_ranks(run, 2)[0]
    error = [rms(grads[name].double() - true[name] for name in true) for grads in (ours, theirs)]
    assert error[0] <= 1.1 * error[1]


def train(model, batch, clip, steps=5):
    """Losses and norms of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with Float64():
            loss = model(**batch).loss
            loss.backward()
        norm = clip(model)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found


@pytest.mark.full
@pytest.mark.parametrize("family", [*MOST, "gpt2", "gpt_oss"])
def test_ranks_train_the_same_model(family, tmp_path):
    """Also with clipped gradients, and what is saved is the whole model."""
    batch, options = batch_of(family), {"vocab_size": 129}
    whole = model_of(family, torch.float64, **options)
    wanted = train(whole, batch, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))

    def run(rank, world_size):
        model = tp_model(family, **options)
        found = train(model, batch, lambda model: clip_grad_norm_(model, 0.5))
        assert found == pytest.approx(wanted, rel=1e-9)
        state = whole_state_dict(model)
        assert bool(state) is (rank == 0)
        if rank == 0:
            model.save_pretrained(tmp_path, state_dict=state)
        for given in ({}, {"state_dict": model.state_dict()}):
            with pytest.raises(
                ValueError, match=r"save_pretrained: this rank has one of 2 shards of .*; call whole"
            ):
                model.save_pretrained(tmp_path / "none", **given)

    run_ranks(run, 2)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], tensor, rtol=0, atol=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_a_whole_state_dict_is_saved_by_the_first_rank(family, tmp_path):
    """In files of the size that is asked for; the others need not be there."""
    wanted = model_of(family).state_dict()

    def run(rank, world_size):
        model = model_of(family)
        fastmp.accelerate(model, group=dist.group.WORLD)
        state = whole_state_dict(model)
        if rank == 0:
            model.save_pretrained(tmp_path / "alone", state_dict=dict(state), max_shard_size="20KB")
        each = tmp_path / f"said-{rank}"
        model.save_pretrained(tmp_path / f"each-{rank}", state_dict=dict(wanted), max_shard_size="20KB")
        model.save_pretrained(tmp_path / "all", state_dict=dict(state), max_shard_size="20KB")
        model.save_pretrained(each, is_main_process=rank == 0, state_dict=state, max_shard_size="20KB")

    run_ranks(run, 2, timeout=60)
    for name in ("alone", "all", "said-0", "each-0"):
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 2
        for file in set(index.values()):
            with safe_open(tmp_path / name / file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                assert {*opened.keys()} == {tensor for tensor, its_file in index.items() if its_file == file}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert loaded.keys() == wanted.keys()
        assert all(torch.equal(loaded[each], tensor) for each, tensor in wanted.items())
    assert not (tmp_path / "said-1").exists() and not (tmp_path / "each-1").exists()


@pytest.mark.full
@pytest.mark.parametrize("family", [*MOST, "gpt2", "deepseek_v3"])
def test_generation_gives_every_rank_the_same_tokens(family):
    ids = batch_of(family)["input_ids"]
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model_of(family, torch.float64).eval().generate(ids, **greedy)

    def run(rank, world_size):
        return tp_model(family).eval().generate(ids, **greedy)

    for found in run_ranks(run, 2):
        assert torch.equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_before_and_after_a_model_is_sharded(family):
    """It trains on, also while losses of before are kept."""

    def run(rank, world_size):
        batch, model = batch_of(family), model_of(family, torch.float64)
        with Float64():
            before, wanted = step(model, **batch)
            fastmp.accelerate(model, group=dist.group.WORLD)
            during, _ = step(model, **batch)
            found = [whole_gradients(model, dist.group.WORLD)]
            fastmp.restore(model)
            after, grads = step(model, **batch)
        for each in (*found, grads):
            for name, grad in wanted.items():
                torch.testing.assert_close(each[name], grad, rtol=0, atol=1e-9)
        assert before.loss == after.loss and abs(before.loss - during.loss) <= 1e-9

    run_ranks(run, 2)


@pytest.mark.full
def test_a_body_with_another_head_is_divided_too():
    ids, config = batch_of("llama")["input_ids"], model_of("llama", pad_token_id=0).config

    def classified(model):
        with Float64():
            return model(input_ids=ids).logits

    def made():
        torch.manual_seed(0)
        return transformers.AutoModelForSequenceClassification.from_config(config).double()

    expected = classified(made())

    def run(rank, world_size):
        table = fastmp.accelerate(model := made(), group=dist.group.WORLD)
        assert "LlamaAttention.o_proj" in table.divided and "Linear  " in str(table)
        torch.testing.assert_close(classified(model), expected, rtol=0, atol=1e-9)

    run_ranks(run, 2)


@pytest.mark.parametrize("family", CONFIGS)
def test_tables_agree_with_the_plans_that_transformers_has(family):
    """Where it has one; it shards single experts there, which here are sharded by their number."""
    model = model_of(family)
    parts = {
        re.sub(r"\d+", "*", share.name): share.mixin for share in acceleration._plan(model, 2, None, None).tp
    }
    plan = {f"model.{name}": style for name, style in (model.config.base_model_tp_plan or {}).items()}
    meant = {"colwise": ColumnParallel, "rowwise": RowParallel, "replicated_with_grad_allreduce": PerHeadNorm}
    found = {re.sub(r"\d+", "*", name) for name, _ in model.named_modules()}
    for name in found & plan.keys():
        if plan[name] in meant:  # not experts, tables of words, and what is replicated in either
            assert issubclass(parts[name], meant[plan[name]]), name


# What is refused leaves the model as it was, on all ranks.


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "llama",
            {"num_attention_heads": 1, "num_key_value_heads": 1},
            "num_attention_heads 1 is not divisible by",
        ),
        (
            "llama",
            {"num_key_value_heads": 1},
            "num_key_value_heads 1 is not divisible by the 2 ranks",
        ),
        (
            "llama",
            {"intermediate_size": 47},
            "of model.layers.0.mlp.gate_proj.weight, 47, is not divisible",
        ),
        (
            "qwen3_moe",
            {"num_experts": 3},
            "of model.layers.1.mlp.experts.gate_up_proj, 3, is not div",
        ),
        ("gpt2", {"attn_pdrop": 0.1}, "transformer.h.0.attn.attn_dropout.p is 0.1; dropout and jitter"),
        ("llama", {"attention_dropout": 0.1}, "model.layers.0.self_attn.attention_dropout is 0.1"),
        ("mixtral", {"router_jitter_noise": 0.1}, "model.layers.0.mlp.jitter_noise is 0.1"),
        ("gpt2", {"add_cross_attention": True}, "no tensor-parallel plan for transformer.h.0.crossattention"),
    ],
)
def test_what_ranks_do_not_divide(family, options, message):
    def run(rank, world_size):
        untouched(model_of(family, **options), message)

    run_ranks(run, 2)


def untouched(model, message):
    classes, shapes = [type(module) for module in model.modules()], [p.shape for p in model.parameters()]
    with pytest.raises(ValueError, match=message) as raised:
        fastmp.accelerate(model, group=dist.group.WORLD)
    assert "\n" not in str(raised.value)
    assert [type(module) for module in model.modules()] == classes
    assert [parameter.shape for parameter in model.parameters()] == shapes


@pytest.mark.full
def test_ranks_that_differ_and_modules_that_are_not_known():
    def run(rank, world_size):
        model = model_of("llama")
        if rank == 1:
            model.model.layers[1].mlp.up_proj.weight.data += 1
        untouched(
            model,
            "model.layers.1.mlp.up_proj.weight of rank 1 of the group differs from that of rank 0;",
        )
        model = model_of("llama", num_attention_heads=4 - 3 * rank, num_key_value_heads=1 + (1 - rank))
        untouched(
            model, f"num_attention_heads 1 is not divisible.*{'on rank 1 of the group' if rank == 0 else ''}"
        )
        model = model_of("llama")
        model.model.layers[0].self_attn.scale = torch.nn.Parameter(torch.ones(3))
        model.model.layers[0].mlp.extra_proj = torch.nn.Linear(2, 2)
        untouched(model, "no tensor-parallel plan for model.layers.0.mlp.extra_proj.weight")
        model = model_of("llama")
        model.model.layers[0].mlp.up_proj = torch.nn.Bilinear(2, 2, 2)
        untouched(
            model, "mlp.up_proj is torch.nn.modules.linear.Bilinear, not torch.nn.modules.linear.Linear"
        )
        with torch.device("meta"):
            model = model_of("llama")
        untouched(model, "LlamaForCausalLM is on the meta device and has no weights to shard")
        wrapped = DistributedDataParallel(model_of("llama"))
        with pytest.raises(ValueError, match="got a DistributedDataParallel; accelerate the model before"):
            fastmp.accelerate(wrapped, group=dist.group.WORLD)
        fastmp.accelerate(model := model_of("llama"))
        with pytest.raises(
            ValueError, match="LlamaForCausalLM is accelerated for another group; restore it first"
        ):
            fastmp.accelerate(model, group=dist.group.WORLD)
        fastmp.restore(model)
        if rank == 1:
            fastmp.accelerate(model)
        with pytest.raises(ValueError, match="LlamaForCausalLM is accelerated for another group"):
            fastmp.accelerate(model, group=dist.group.WORLD)
        with pytest.raises(ValueError, match="with a group, got a Sequential"):
            fastmp.accelerate(
                torch.nn.Sequential(model_of("llama")) if rank else model_of("llama"), group=dist.group.WORLD
            )
        first = dist.new_group([0])
        with (
            pytest.raises(ValueError, match="expected a ProcessGroup that this rank is in, got -100")
            if rank
            else nullcontext()
        ):
            fastmp.accelerate(model_of("llama"), group=first)

    run_ranks(run, 2)


@pytest.mark.full
def test_one_rank_trains_and_saves_as_several_do(tmp_path):
    """A script for a group also runs with one rank."""

    def run(rank, world_size):
        model, reference = model_of("llama", torch.float64), model_of("llama", torch.float64)
        fastmp.accelerate(model, group=dist.group.WORLD)
        batch = batch_of("llama")
        with Float64():
            found = train(model, batch, lambda model: clip_grad_norm_(model, 0.5))
            wanted = train(
                reference, batch, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            )
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
        model.save_pretrained(tmp_path, state_dict=whole_state_dict(model))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        for name, tensor in reference.state_dict().items():
            torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-7, atol=1e-9)

    run_ranks(run, 1)


@pytest.mark.full
def test_norms_are_summed_where_the_model_is_also_where_all_that_is_divided_is_frozen(monkeypatch):
    def run(rank, world_size):
        devices = []
        monkeypatch.setattr(tp_plan, "all_reduce_", lambda tensor, group: devices.append(tensor.device.type))
        model = tp_model("llama").to("meta")
        model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
        assert clip_grad_norm_(model, 1.0).device.type == "meta"
        assert devices == ["meta"]

    run_ranks(run, 2)


@pytest.mark.full
@pytest.mark.parametrize("longer", [0, 1])
def test_ranks_with_other_tokens_are_noticed_in_the_first_call(longer):
    """A loader gives them that divides samples over all ranks, with batches of one length or of several."""

    def run(rank, world_size):
        model, ids = tp_model("llama"), torch.arange(6 + longer * rank).reshape(1, -1)
        with pytest.raises(ValueError, match="rank 1 of the group has other tokens than rank 0; all ranks"):
            model(input_ids=ids + rank, labels=ids)

    run_ranks(run, 2)
