"""`fastmp.accelerate`: models of transformers compute the same with fastmp's ops, whatever is around them."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import hf_models
import pytest
import torch
from hf_models import CONFIGS, Float64, are_lazy, assert_same, batch_of, model_of, step
from marks import full

import fastmp

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)
from fastmp.hf import patches  # noqa: E402

HEADS = "fastmp.ops.linear_cross_entropy"
MOST = ["llama", "qwen3_moe", *full(family for family in CONFIGS if family not in ("llama", "qwen3_moe"))]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_computes_the_same_before_and_after(family):
    model, batch = model_of(family, torch.float64), batch_of(family)
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    with Float64():
        expected = step(model, **batch)
        expected_logits = model.eval()(input_ids=batch["input_ids"]).logits
        table = fastmp.accelerate(model)
        found = step(model.train(), **batch)
        logits = model.eval()(input_ids=batch["input_ids"]).logits
    assert_same(found, expected, 1e-9)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-9)
    assert are_lazy(found[0].logits) and found[0].keys() == expected[0].keys()
    torch.testing.assert_close(found[0].logits, expected[0].logits, rtol=0, atol=1e-9)
    assert list(model.state_dict()) == keys
    assert len(table.replaced) >= 3 and HEADS in table.replaced.values()
    if "Moe" in type(model).__name__ or family in (
        "mixtral",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
    ):
        assert any("grouped_mm" in by for by in table.replaced.values())

    fastmp.restore(model)
    assert [type(module) for module in model.modules()] == classes
    with Float64():
        again = model(input_ids=batch["input_ids"]).logits
    assert torch.equal(again, expected_logits)


EVERY_EXPERT = {
    **{family: {"num_experts_per_tok": 4} for family in ("gpt_oss", "mixtral", "qwen3_moe")},
    **{
        family: {"num_experts_per_tok": 8, "topk_group": 2}
        for family in ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe")
    },
}


def rms(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors]).square().mean().sqrt()


@pytest.mark.parametrize("family", MOST)
def test_in_bfloat16_errors_are_those_of_transformers(family):
    """Against float64; every token has all experts, for a flipped choice is no rounding."""
    batch = batch_of(family, 4, 64)
    sizes = {"output_router_logits": False} if "output_router_logits" in CONFIGS[family][1] else {}
    model = model_of(family, torch.bfloat16, **sizes, **EVERY_EXPERT.get(family, {}))
    exact = copy.deepcopy(model).double()
    with Float64():
        _, true = step(exact, **batch)
    _, theirs = step(model, **batch)
    fastmp.accelerate(model)
    _, ours = step(model, **batch)
    error = {
        name: rms(grads[n] - true[n] for n in true) for name, grads in (("ours", ours), ("theirs", theirs))
    }
    assert error["ours"] <= 1.1 * error["theirs"]


@pytest.mark.parametrize("family", MOST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_what_it_gives_transformers(family, dtype):
    """float32 weights under autocast in bfloat16; in float32 it is off."""
    options = EVERY_EXPERT.get(family, {}) if dtype == torch.bfloat16 else {}
    model, batch = model_of(family, **options), batch_of(family)

    def under_autocast(**given):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return step(model, **given)

    expected = under_autocast(**batch)
    fastmp.accelerate(model)
    assert_same(under_autocast(**batch), expected, 1e-5 if dtype == torch.float32 else 3e-2)


ROTATED = ["llama", *full(["qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"])]


@pytest.mark.parametrize("family", ROTATED)
@pytest.mark.parametrize(
    ("weights", "dtype"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str
)
def test_weights_of_16_bits_under_the_other_autocast(family, weights, dtype):
    """A checkpoint in FP16 with bf16=True, and the reverse."""
    model, batch = model_of(family, weights, **EVERY_EXPERT.get(family, {})), batch_of(family)
    with torch.autocast("cpu", dtype=dtype):
        expected = step(model, **batch)
        fastmp.accelerate(model)
        assert_same(step(model, **batch), expected, 3e-2)


def test_a_router_whose_groups_have_too_few_experts_stays():
    """As the common tests of transformers configure DeepSeek-V3."""
    model, batch = model_of("deepseek_v3", num_experts_per_tok=8, topk_group=1), batch_of("deepseek_v3")
    expected = step(model, **batch)
    table = fastmp.accelerate(model)
    assert table.kept["DeepseekV3TopkRouter"].startswith("a token's 8 experts are more than there are in 1")
    assert_same(step(model, **batch), expected, 1e-5)


@pytest.mark.parametrize("family", MOST)
def test_it_compiles_in_one_graph(family):
    model, batch = model_of(family, use_cache=False), batch_of(family)
    fastmp.accelerate(model)
    expected = step(model, **batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    output = compiled(**batch)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same((output, grads), expected, 1e-5)


@pytest.mark.parametrize("family", MOST)
def test_gradient_checkpointing_changes_nothing(family):
    model, batch = model_of(family), batch_of(family)
    fastmp.accelerate(model)
    expected = step(model, **batch)
    model.gradient_checkpointing_enable()
    assert_same(step(model, **batch), expected, 1e-6)


@pytest.mark.parametrize("options", [{"rope_interleave": False}, {"norm_topk_prob": False, "topk_group": 2}])
@pytest.mark.full
def test_the_forms_that_deepseek_has(options):
    """Positions of halves, and a router that neither closes groups nor divides by the sum."""
    model, batch = model_of("deepseek_v3", torch.float64, **options), batch_of("deepseek_v3")
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.normal_(std=0.1)
    with Float64():
        expected = step(model, **batch)
        fastmp.accelerate(model)
        assert_same(step(model, **batch), expected, 1e-9)


def flattened(lengths, **options):
    """Documents as transformers packs them into one row, and each in a batch of its own."""
    ids = torch.randint(3, hf_models.VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    collate = transformers.DataCollatorWithFlattening(**options)
    packed = collate([{"input_ids": piece.tolist()} for piece in ids.split(lengths)])
    return dict(packed), [{"input_ids": piece[None], "labels": piece[None]} for piece in ids.split(lengths)]


NO_SINKS = [family for family in CONFIGS if family != "gpt_oss"]


@pytest.mark.parametrize("family", ["llama", *full(family for family in NO_SINKS if family != "llama")])
def test_a_flattened_batch_is_its_documents_one_by_one(family):
    """By their borders and no mask, and by the masks that transformers makes of their positions."""
    experts = {"output_router_logits": False} if "output_router_logits" in CONFIGS[family][1] else {}
    model = model_of(family, torch.float64, use_cache=False, **experts)
    lengths = (11, 2, 7, 20)
    batch, alone = flattened(lengths, return_flash_attn_kwargs=True)
    if family == "bert":  # whose labels are not those of the next token, but whose first does not count here
        alone = [
            {**each, "labels": each["labels"].clone().index_fill_(1, torch.tensor([0]), -100)}
            for each in alone
        ]
    shares = [(length - 1) / (sum(lengths) - len(lengths)) for length in lengths]
    with Float64():
        steps = [step(model, **each) for each in alone]
        loss = sum(share * output.loss for share, (output, _) in zip(shares, steps))
        names = {name for _, grads in steps for name in grads}
        grads = {n: sum(s * g[n] for s, (_, g) in zip(shares, steps) if n in g) for n in names}
        fastmp.accelerate(model)
        # transformers keeps documents apart by their positions under causality alone
        for attention in ("fastmp_varlen", *(() if family == "bert" else ("sdpa", "eager"))):
            model.set_attn_implementation(attention)
            output, found = step(model, **batch)
            torch.testing.assert_close(output.loss, loss, rtol=0, atol=1e-9)
            for name, grad in grads.items():
                torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-9, msg=name)


def of_flattened_batches(attention):
    model = model_of("qwen3", use_cache=False)
    fastmp.accelerate(model)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.full
def test_the_trainer_takes_flattened_batches(tmp_path):
    features = [{"input_ids": list(range(3, 3 + n))} for n in (9, 7, 12, 4, 8, 8, 10, 6)]
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "use_cpu": True, "logging_steps": 1}
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], save_strategy="no", **options)
    collate, losses = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True), []
    for attention in ("sdpa", "fastmp_varlen"):
        model = of_flattened_batches(attention)
        model.gradient_checkpointing_enable()
        trainer = transformers.Trainer(model, arguments, train_dataset=features, data_collator=collate)
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.full
def test_flattened_batches_compile_in_one_graph():
    model, (batch, _) = (
        of_flattened_batches("fastmp_varlen"),
        flattened((9, 7), return_flash_attn_kwargs=True),
    )
    expected = step(model, **batch)
    torch._dynamo.reset()
    model.zero_grad()
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same((output, grads), expected, 1e-5)


def test_attention_by_borders_refuses_what_it_does_not_know():
    batch, _ = flattened((9, 7), return_flash_attn_kwargs=True)
    model = model_of("llama", use_cache=False)
    fastmp.accelerate(model)
    model.set_attn_implementation("fastmp_varlen")
    with pytest.raises(ValueError, match="fastmp_varlen: the batch does not say where documents begin; take"):
        model(**batch_of("llama"))
    with pytest.raises(ValueError, match=r"one row of packed documents, got 2 rows; set_attn"):
        rows = {name: batch[name].view(2, 8) for name in ("input_ids", "labels", "position_ids")}
        model(**{**batch, **rows})
    model = model_of("gpt_oss", use_cache=False)
    model.set_attn_implementation("fastmp_varlen")
    with pytest.raises(ValueError, match="got 1 rows, attention sinks; set_attn_implementation"):
        model(**batch)


@pytest.mark.parametrize(
    "family", ["llama", *full(["mistral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"])]
)
def test_packed_documents_are_as_far_apart_as_in_transformers(family):
    """Positions that restart in a row: no mask but the one that transformers makes of them."""
    model, batch = model_of(family), batch_of(family)
    positions = torch.cat([torch.arange(10), torch.arange(6)]).expand(2, -1)
    expected = step(model, **batch, position_ids=positions)
    unpacked = step(model, **batch)
    assert abs(expected[0].loss - unpacked[0].loss) > 1e-6
    fastmp.accelerate(model)
    assert_same(step(model, **batch, position_ids=positions), expected, 1e-5)


def test_padding_and_left_out_positions():
    model, batch = model_of("qwen3_moe"), batch_of("qwen3_moe")
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 12:] = 0
    expected = step(model, **batch, attention_mask=mask)
    fastmp.accelerate(model)
    assert_same(step(model, **batch, attention_mask=mask), expected, 1e-5)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", *full(["gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"])]
)
def test_generation_gives_the_same_tokens(family):
    model = model_of(family).eval()
    ids = batch_of(family)["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    fastmp.accelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"shift_labels": torch.full((2, 16), 5)},
        {"ignore_index": 7},
        {"output_hidden_states": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_the_loss_and_of_outputs(options):
    model, batch = model_of("qwen3_moe"), batch_of("qwen3_moe")
    expected = step(model, **{**batch, "labels": batch["labels"].clamp(min=3)}, **options)
    fastmp.accelerate(model)
    found = step(model, **{**batch, "labels": batch["labels"].clamp(min=3)}, **options)
    assert_same(found, expected, 1e-5)
    assert found[0].keys() == expected[0].keys() and are_lazy(found[0].logits)


def test_logits_are_there_when_they_are_asked_for():
    model, batch = model_of("llama"), batch_of("llama")
    expected = model(input_ids=batch["input_ids"]).logits
    fastmp.accelerate(model)
    torch.testing.assert_close(
        model(input_ids=batch["input_ids"]).logits, expected
    )  # in training, without labels
    kept = model(input_ids=batch["input_ids"], logits_to_keep=4).logits
    torch.testing.assert_close(kept, expected[:, -4:])
    assert model.eval()(**batch).logits.shape == expected.shape
    loss, logits, _ = model.train()(**batch, return_dict=False)
    assert are_lazy(logits) and loss.dim() == 0

    model.loss_function = model.loss_function
    output = model(**batch)
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, model.eval()(**batch).loss)
    model.train()

    def doubled(logits, labels, vocab_size, **others):
        return 2 * logits.sum()

    model.loss_function = doubled
    output = model(**batch)
    assert output.loss == 2 * output.logits.sum()


@pytest.mark.parametrize("option", ["reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx"])
def test_logits_of_a_training_step_as_the_tests_of_transformers_read_them(option):
    model, batch = model_of("gpt2", **{option: True}), batch_of("gpt2")
    model.gradient_checkpointing_enable()
    expected = model(**batch).logits
    fastmp.accelerate(model)
    output = model(**batch)
    assert output.loss.shape == () and output.logits.shape == expected.shape
    output.loss.backward()
    torch.testing.assert_close(output.logits, expected)


def test_a_loss_of_the_logits_beside_that_of_the_labels():
    """As distillation adds one: the gradient reaches all parameters."""

    def gradients(model):
        model.zero_grad()
        output = model(**batch_of("qwen3_moe"))
        (output.loss + output["logits"].square().mean() + output[1].mean()).backward()
        return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model = model_of("qwen3_moe", output_router_logits=False)
    expected = gradients(model)
    fastmp.accelerate(model)
    assert_same(gradients(model), expected, 1e-5)


def test_positional_arguments():
    model, batch = model_of("llama"), batch_of("llama")
    arguments = (batch["input_ids"], None, None, None, None, batch["labels"])
    expected = model(*arguments).loss
    fastmp.accelerate(model)
    output = model(*arguments)
    torch.testing.assert_close(output.loss, expected)
    assert are_lazy(output.logits)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_accelerated_too(how):
    model, batch = model_of("qwen3_moe", output_router_logits=False), batch_of("qwen3_moe")
    fastmp.accelerate(model)
    expected = step(model, **batch)
    other = how(model)
    assert_same(step(other, **batch), expected, 1e-7)
    fastmp.restore(other)
    assert are_lazy(model(**batch).logits) and not are_lazy(other(**batch).logits)


def test_other_models_of_the_process_stay_as_they_are():
    one, other = model_of("llama"), model_of("llama")
    classes = {type(module) for module in other.modules()}
    fastmp.accelerate(one)
    assert {type(module) for module in other.modules()} == classes
    assert type(one).__name__ == "LlamaForCausalLM" and isinstance(one, transformers.LlamaForCausalLM)
    assert other(**batch_of("llama")).logits is not None


def test_the_table_says_what_was_replaced_and_what_not():
    model = model_of("deepseek_v3", hidden_act="relu")
    table = fastmp.accelerate(model)
    assert str(table).splitlines()[0] == "DeepseekV3ForCausalLM"
    assert table.kept["DeepseekV3MLP"] == "its activation is ReLU, which fastmp has no gated op of"
    assert table.replaced["DeepseekV3TopkRouter"] == "fastmp.ops.topk_router"
    assert "kept: transformers' interface" in str(table)
    assert fastmp.accelerate(model) is table


def test_a_table_of_another_size_makes_the_loss_too():
    """Users add tokens after the one line."""
    for accelerated in (False, True):
        model, batch = model_of("llama"), batch_of("llama")
        if accelerated:
            fastmp.accelerate(model)
        torch.manual_seed(0)
        model.resize_token_embeddings(140)
        if not accelerated:
            expected = step(model, **batch)
    found = step(model, **batch)
    assert_same(found, expected, 1e-5)
    assert are_lazy(found[0].logits) and found[0].logits.shape[-1] == 140
    torch.testing.assert_close(found[0].logits, model.eval()(**batch).logits)
    model.train()
    fastmp.restore(model)
    assert type(model.lm_head) is torch.nn.Linear and model(**batch).logits is not None


def test_logits_of_routers_are_an_output_where_they_are_asked_for():
    model, batch = model_of("deepseek_v3"), batch_of("deepseek_v3")
    expected = model(**batch, output_router_logits=True)
    fastmp.accelerate(model)
    found = model(**batch, output_router_logits=True)
    assert found.keys() == expected.keys() and "router_logits" in found
    for ours, theirs in zip(found.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_subclasses_stay_and_the_table_says_so():
    class Doubled(transformers.models.llama.modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    class Mine(transformers.LlamaForCausalLM):
        pass

    model, batch = Mine(model_of("llama").config).train(), batch_of("llama")
    model.model.norm.__class__ = Doubled
    expected = step(model, **batch)
    table = fastmp.accelerate(model)
    assert table.kept["Doubled"].startswith("a subclass of LlamaRMSNorm")
    assert table.kept["Mine"].startswith("a subclass of LlamaForCausalLM")
    assert_same(step(model, **batch), expected, 1e-5)


def test_the_example_of_the_page(capsys):
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})
    assert capsys.readouterr().out == re.findall(r"```\n(Qwen3MoeForCausalLM\n.*?)```", page, re.DOTALL)[0]


@pytest.mark.parametrize("which", ["model", "head"])
def test_modules_with_a_forward_of_their_own_stay(which):
    """Accelerate's hooks, of offloaded models for example, set one on the module."""
    model, batch = model_of("llama"), batch_of("llama")
    expected = step(model, **batch)
    module = model if which == "model" else model.lm_head
    module.forward = module.forward
    table = fastmp.accelerate(model)
    assert "forward of its own" in table.kept["LlamaForCausalLM"]
    found = step(model, **batch)
    assert_same(found, expected, 1e-5)
    assert found[0].logits is not None


def test_a_second_backward_through_a_loss_of_few_logits_adds_the_same():
    model = model_of("llama")
    fastmp.accelerate(model)
    loss = model(**batch_of("llama")).loss
    loss.backward(retain_graph=True)
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * grads[name], msg=name)


def test_a_model_without_a_head_is_accelerated_too():
    model = transformers.AutoModel.from_config(model_of("llama").config)
    ids = batch_of("llama")["input_ids"]
    expected = model(input_ids=ids).last_hidden_state
    assert HEADS not in fastmp.accelerate(model).replaced.values()
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, expected)


OTHER_HEADS = [
    ("bert", "AutoModelForSequenceClassification"),
    ("llama", "AutoModelForSequenceClassification"),
    *full(
        [
            *(("bert", f"AutoModelFor{task}") for task in ("TokenClassification", "QuestionAnswering")),
            ("bert", "AutoModelForNextSentencePrediction"),
            ("bert", "AutoModelForPreTraining"),
            *(
                (family, "AutoModelForTokenClassification")
                for family in CONFIGS
                if family
                not in ("bert", "dots1", "glm4_moe", "deepseek_v2")  # of which transformers has no such class
            ),
            *((family, "AutoModelForQuestionAnswering") for family in ("gpt2", "mixtral", "qwen3")),
        ]
    ),
]


@pytest.mark.parametrize(("family", "auto"), OTHER_HEADS)
def test_models_with_other_heads_keep_these_and_get_the_rest(family, auto):
    """transformers' own head and loss over an accelerated body: outputs and gradients stay the same."""
    config = model_of(family).config
    config.classifier_dropout, config.pad_token_id = 0.0, 0
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config, experts_implementation="eager").double()
    ids = batch_of(family)["input_ids"]

    def gradients():
        model.zero_grad()
        output = model(input_ids=ids)
        output[0].square().mean().backward()
        return output[0], {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with Float64():
        expected, wanted = gradients()
        table = fastmp.accelerate(model)
        found, grads = gradients()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert grads.keys() == wanted.keys() and grads
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-9, msg=name)
    assert table.kept[type(model).__name__] == "its head and loss have no patch"
    assert any("norm" in by for by in table.replaced.values()) and HEADS not in table.replaced.values()


def test_saved_configurations_name_the_same_model(tmp_path):
    model = model_of("qwen3_moe")
    fastmp.accelerate(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        type(again) is transformers.Qwen3MoeForCausalLM and again.config._experts_implementation != "fastmp"
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.full
def test_a_gate_that_computes_something_else_stays(monkeypatch):
    """As a later version of transformers may have it, with the same attributes."""

    def gate(self, pairs):
        gate, up = pairs[..., ::2].clamp(max=self.limit), pairs[..., 1::2]
        return up * gate * torch.sigmoid(gate * self.alpha)

    monkeypatch.setattr(transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts, "_apply_gate", gate)
    model, batch = model_of("gpt_oss"), batch_of("gpt_oss")
    expected = step(model, **batch)
    assert fastmp.accelerate(model).replaced["GptOssExperts"].endswith("between them transformers' gate")
    assert_same(step(model, **batch), expected, 1e-5)


# What is refused leaves the model as it was.


def untouched(model, message, call=fastmp.accelerate):
    classes = [type(module) for module in model.modules()]
    implementation = model.config._experts_implementation if hasattr(model, "config") else None
    with pytest.raises(ValueError, match=message) as raised:
        call(model)
    assert "\n" not in str(raised.value)
    assert [type(module) for module in model.modules()] == classes
    if implementation is not None:
        assert model.config._experts_implementation == implementation


def test_unknown_models_are_refused():
    for wrong, message in (
        (
            "Qwen/Qwen3-0.6B",
            r"got 'Qwen/Qwen3-0.6B'; pass AutoModelForCausalLM.from_pretrained\('Qwen/Qwen3-0.6B'\)",
        ),
        (transformers.Qwen3ForCausalLM, "pass an instance"),
        (None, "expected a transformers model, got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            fastmp.accelerate(wrong)
    untouched(torch.nn.Linear(2, 2), "accelerate: expected a transformers model or .*, got Linear")
    config = transformers.OPTConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, ffn_dim=16, num_attention_heads=2
    )
    untouched(
        transformers.OPTForCausalLM(config),
        "OPTForCausalLM .model_type 'opt'. is not supported; expected one of gpt2, ",
    )
    untouched(model_of("llama"), "restore: LlamaForCausalLM is not accelerated", fastmp.restore)


def test_several_models_in_a_module_are_refused():
    both = torch.nn.ModuleList([model_of("llama"), model_of("qwen3")])
    untouched(both, "accelerate: ModuleList holds several transformers models; accelerate each")


def rename(module, name):
    """What another version does: an attribute has another name."""
    for attributes in (vars(module), module._parameters, module._modules):
        if name in attributes:
            attributes[f"another_{name}"] = attributes.pop(name)


def of_experts(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


RENAMED = [
    ("qwen3_moe", lambda model: model.model.norm, "variance_epsilon", "Qwen3MoeRMSNorm of .* has no"),
    ("qwen3_moe", of_experts, "gate_up_proj", "Qwen3MoeExperts of .* has no"),
    ("qwen3_moe", of_experts, "down_proj", "Qwen3MoeExperts of .* has no"),
    ("qwen3_moe", of_experts, "act_fn", "Qwen3MoeExperts of .* has no"),
    ("gpt_oss", of_experts, "gate_up_proj_bias", "GptOssExperts of .* has no"),
    ("gpt_oss", of_experts, "down_proj_bias", "GptOssExperts of .* has no"),
    ("llama", lambda model: model, "model", "LlamaForCausalLM of .* has no"),
    ("llama", lambda model: model, "lm_head", "LlamaForCausalLM of .* has no"),
    ("qwen3_moe", lambda model: model, "router_aux_loss_coef", "Qwen3MoeForCausalLM of .* has no"),
    ("bert", lambda model: model.cls, "predictions", "BertForMaskedLM of .* has no cls."),
    (
        "bert",
        lambda model: model.cls.predictions,
        "transform",
        "BertForMaskedLM of .* has no cls.predictions.",
    ),
    ("bert", lambda model: model.cls.predictions, "decoder", "BertForMaskedLM of .* has no cls.predictions."),
]


@pytest.mark.parametrize(("family", "of", "name", "message"), RENAMED)
def test_an_attribute_that_another_version_renames(family, of, name, message):
    model = model_of(family)
    rename(of(model), name)
    untouched(
        model, f"accelerate: {message.replace(' of ', ' of transformers ')} ?{name}.*; nothing was changed"
    )


def test_a_class_that_another_version_renames(monkeypatch):
    model = model_of("llama")
    monkeypatch.delattr(transformers.models.llama.modeling_llama, "LlamaRMSNorm")
    untouched(model, "has no class LlamaRMSNorm in transformers.models.llama.modeling_llama")


def test_a_function_that_another_version_renames(monkeypatch):
    def forward(self, hidden_states):
        return rotate_differently(hidden_states)  # noqa: F821

    monkeypatch.setattr(patches, "_PATCHED", {})
    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", forward)
    untouched(model_of("llama"), "LlamaAttention of .* has no forward that calls apply_rotary_pos_emb")


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    raise NotImplementedError


ELSEWHERE = [  # what is not the model's: its place, and what takes it
    (
        "llama",
        "models.llama.modeling_llama.apply_rotary_pos_emb",
        apply_rotary_pos_emb,
        "apply_rotary_pos_emb of q, k",
    ),
    ("llama", "modeling_outputs.CausalLMOutputWithPast", None, "CausalLMOutputWithPast"),
    (
        "qwen3_moe",
        "models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func",
        None,
        "load_balancing_loss_",
    ),
    ("qwen3_moe", "PreTrainedModel.set_experts_implementation", None, "set_experts_implementation"),
    ("qwen3_moe", "integrations.moe.ALL_EXPERTS_FUNCTIONS", None, "ALL_EXPERTS_FUNCTIONS"),
]


@pytest.mark.parametrize(("family", "place", "instead", "message"), ELSEWHERE)
def test_what_else_another_version_changes(family, place, instead, message, monkeypatch):
    model = model_of(family)
    monkeypatch.setattr(patches, "_PATCHED", {})
    if instead is None:
        monkeypatch.delattr(f"transformers.{place}")
    else:
        monkeypatch.setattr(f"transformers.{place}", instead)
    untouched(model, f"accelerate: .* of transformers .*{message}.*; nothing was changed")
