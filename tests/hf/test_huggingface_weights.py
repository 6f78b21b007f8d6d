"""The weights of checkpoints as `transformers` reads them."""

from __future__ import annotations

import json
from dataclasses import replace

import gpt2_reference
import hf_models
import pytest
import torch
from marks import full
from safetensors import safe_open
from safetensors.torch import load_file

from fastmp.config import GPTConfig, MoEConfig, RopeScaling
from fastmp.hf import weight_io as transformers_weights
from fastmp.hf.config_json import to_transformers
from fastmp.hf.weight_io import check_family, export_weights
from fastmp.training.checkpoint.checkpointer import Checkpointer
from fastmp.training.checkpoint.storage import ShardedTensorRef

FAMILIES = {"gpt2": "GPT2", **{family.lower(): family for family in hf_models.BUNDLED}}


def load_reference(family):
    if family == "gpt2":
        return gpt2_reference.load_bundle(), gpt2_reference.BUNDLE
    name = FAMILIES[family]
    return hf_models.load_bundle(name), hf_models.bundle_of(name)


def export(family, tmp_path, variant=None):
    """A checkpoint with the weights of the reference, exported; `variant` changes its configuration."""
    reference, bundle = load_reference(family)
    if variant is not None:
        reference["config"] = variant(reference["config"])
    weights = reference["weights"]
    if not reference["config"].tie_embeddings:
        weights.setdefault("output_layer.weight", weights["word_embedding.weight"].clone())
    state = {f"model/{name}": ShardedTensorRef.whole(tensor) for name, tensor in weights.items()}
    path = Checkpointer(tmp_path / "checkpoints").save(1, state, {})
    return export_weights(path, reference["config"], tmp_path / "weights"), reference, bundle


def in_memory(tensors):
    """The tensors of files under the names and in the shapes that models of transformers 5 have."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".experts.")
        if not rest:
            found[name.replace("block_sparse_moe", "mlp")] = tensor
            continue
        number, part, _ = rest.split(".")
        names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        experts.setdefault(layer.replace("block_sparse_moe", "mlp"), {})[
            int(number), names.get(part, part)
        ] = tensor
    for layer, parts in experts.items():
        numbers = range(len(parts) // 3)
        gate_up = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in numbers]
        found[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        found[f"{layer}.experts.down_proj"] = torch.stack([parts[i, "down_proj"] for i in numbers])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_are_those_of_the_reference(family, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_weights, "FILE_BYTES", 20_000)  # so that there are several files
    out, _, bundle = export(family, tmp_path)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert len(files) > 2 and {name: file for file in files for name in files[file]} == index["weight_map"]
    exported = in_memory({name: tensor for each in files.values() for name, tensor in each.items()})
    with safe_open(bundle, "pt") as file:
        expected = {
            n.removeprefix("weight."): file.get_tensor(n) for n in file.keys() if n.startswith("weight.")
        }
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name


def softmax_over_the_chosen(config):
    return replace(config, moe=replace(config.moe, pre_softmax=False, normalize_topk=False))


def all_is_given(config):
    return replace(
        config, num_kv_heads=config.kv_heads, head_size=config.head_dim, ffn_hidden_size=config.ffn_size
    )


def untied(config):
    return replace(all_is_given(config), tie_embeddings=False, rope_base=5e5)


VARIANTS = {  # of the same function
    "gpt2": untied,
    "llama": all_is_given,
    "qwen3": all_is_given,
    "mixtral": softmax_over_the_chosen,
    "qwen3moe": all_is_given,  # which does not normalise
}


@pytest.mark.parametrize(
    ("family", "variant"),
    [*full((family, variant) for family in FAMILIES for variant in (None, VARIANTS[family]))],
)
def test_transformers_loads_and_computes_the_same(family, variant, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    out, reference, _ = export(family, tmp_path, variant)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float64, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(report.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = model.eval()(reference["tokens"]).logits
    torch.testing.assert_close(logits, reference["logits"].double(), rtol=0, atol=1e-5)


def test_another_export_takes_the_place_of_the_one_before(tmp_path):
    out, reference, _ = export("llama", tmp_path)
    (out / "left").write_text("over")
    export_weights(tmp_path / "checkpoints" / "step-00000001", reference["config"], out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert not list(tmp_path.glob("*.staging"))


LLAMA = GPTConfig(norm="rmsnorm", position="rope", activation="swiglu", linear_bias=False)


@pytest.mark.parametrize(
    ("config", "family", "said"),
    [
        (GPTConfig(num_kv_heads=6, head_size=32, rope_base=5e5), "gpt2", {"n_head": 6}),
        (GPTConfig(layernorm_epsilon=1e-6), "gpt2", {"layer_norm_epsilon": 1e-6}),
        (GPTConfig(tie_embeddings=False), "gpt2", {"tie_word_embeddings": False}),
        (GPTConfig(activation="gelu"), "gpt2", {"activation_function": "gelu"}),
        (replace(LLAMA, activation="geglu"), "llama", {"hidden_act": "gelu_pytorch_tanh"}),
        (
            replace(LLAMA, rope_scaling=RopeScaling("linear", factor=4.0)),
            *("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
        ),
        (replace(LLAMA, sliding_window=9), "mistral", {"sliding_window": 9}),
        (
            replace(LLAMA, qkv_bias=True, sliding_window=9, full_attention_layers=(0, 2)),
            *("qwen2", {"sliding_window": 9, "max_window_layers": 2}),
        ),
        (replace(LLAMA, qkv_bias=True), "qwen2", {"num_key_value_heads": 6}),
        (replace(LLAMA, moe=MoEConfig(pre_softmax=False)), "mixtral", {"num_experts_per_tok": 2}),
        (
            replace(LLAMA, qk_norm=True, moe=MoEConfig(pre_softmax=False)),
            "qwen3_moe",
            {"norm_topk_prob": True},
        ),
        (replace(LLAMA, qk_norm=True, moe=MoEConfig()), "qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_models_that_transformers_has_are_exported_however_they_are_written(config, family, said):
    assert check_family(config) == family
    found = to_transformers(family, config, "float32")
    assert {name: found[name] for name in said} == said


@pytest.mark.parametrize(
    "config",
    [
        replace(LLAMA, linear_bias=True),
        replace(LLAMA, moe=MoEConfig(score="sigmoid", normalize_topk=True)),
        replace(LLAMA, moe=MoEConfig(normalize_topk=False)),
        GPTConfig(position="rope"),
        GPTConfig(num_kv_heads=2),
        GPTConfig(head_size=16),
        replace(LLAMA, moe=MoEConfig(normalize_topk=True), dense_layers=(0,)),
        GPTConfig(moe=MoEConfig()),
    ],
)
def test_models_that_transformers_has_not_are_refused(config):
    with pytest.raises(ValueError, match="no family of transformers computes this model"):
        check_family(config)
