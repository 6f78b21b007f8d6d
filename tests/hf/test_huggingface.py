"""`fastmp hf`: models of transformers in and out, runs that start from them, directories that are refused."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path

import hf_models
import pytest
import torch
from hf_models import ENCODERS, MODELS, save
from marks import full
from safetensors.torch import load_file, save_file

from fastmp.apps.hf import main
from fastmp.config import BertConfig, GPTConfig, LatentConfig, MoEConfig, RopeScaling
from fastmp.config.model import canonical_config
from fastmp.config.recipe import load_recipe
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.hf.config_json import family_of, from_transformers, to_transformers
from fastmp.hf.families import ACCELERATIONS, CONVERSIONS, FAMILIES, Family
from fastmp.hf.weight_io import TransformersReader
from fastmp.nn import GPT, Placement, bert_stages, gpt_stages
from fastmp.optim.named_params import named_parameters
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.checkpointer import Checkpointer, described
from fastmp.training.checkpoint.diff import differences
from fastmp.training.checkpoint.directory import checkpoint_at
from fastmp.training.checkpoint.model_weights import load_weights
from fastmp.training.checkpoint.state import param_shards
from fastmp.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


def files_of(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_every_family_is_registered_and_has_models_to_test():
    names = [path.stem for path in (ROOT / "fastmp" / "hf" / "families").glob("[a-z]*.py")]
    modules = [import_module(f"fastmp.hf.families.{name}") for name in names]
    written = [each for module in modules for each in vars(module).values() if isinstance(each, Family)]
    assert {family.model_type: family for family in written} == FAMILIES
    assert hf_models.CONFIGS.keys() == ACCELERATIONS.keys()
    tested = {re.split("[ ,]", name)[0] for name in (*MODELS, *ENCODERS)}
    assert tested == CONVERSIONS.keys() - {"kimi_k2"}  # of which transformers has no class


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, *full([torch.bfloat16])])
@pytest.mark.parametrize("name", [*MODELS, *ENCODERS])
@pytest.mark.full
def test_there_and_back(name, dtype, tmp_path, capsys):
    """Imported, both models compute the same; exported again, every bit and name is as before."""
    save(name, tmp_path / "model", dtype, max_shard_size="20KB")
    assert main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "ours")]) == 0
    error = float(re.search(r"verified: largest error of logits (\S+),", capsys.readouterr().out)[1])
    assert error < 2e-5
    recipe = load_recipe(tmp_path / "ours" / "recipe.toml")
    kept = checkpoint_at(tmp_path / "ours")
    assert recipe.checkpoint.init_from == str(kept)
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    before, after = files_of(tmp_path / "model"), files_of(tmp_path / "again")
    if recipe.model.tie_embeddings:
        before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    for each, tensor in before.items():
        assert tensor.dtype == after[each].dtype and torch.equal(tensor, after[each]), each
    assert main(["import", str(tmp_path / "again"), "--no-verify", "--out", str(tmp_path / "third")]) == 0
    assert not list(differences(kept, checkpoint_at(tmp_path / "third")))
    third = load_recipe(tmp_path / "third" / "recipe.toml")
    assert canonical_config(third.model) == canonical_config(recipe.model)


CONFIGS = {
    "llama": GPTConfig(norm="rmsnorm", position="rope", activation="swiglu", linear_bias=False),
    "gpt2": GPTConfig(vocab_size=131),
}
CONFIGS["qwen2"] = replace(CONFIGS["llama"], qkv_bias=True, rope_scaling=RopeScaling())
CONFIGS["qwen3_moe"] = replace(
    CONFIGS["llama"],
    **{"qk_norm": True, "dense_layers": (0,), "moe": MoEConfig(num_experts=4, aux_loss=0.03)},
)
CONFIGS["gpt_oss"] = replace(
    CONFIGS["llama"],
    **{"activation": "clamped_swiglu", "linear_bias": True, "attention_sinks": True},
    **{"sliding_window": 5, "full_attention_layers": (1,)},
    moe=MoEConfig(num_experts=4, pre_softmax=False, linear_bias=True, router_bias=True, aux_loss=0.03),
)
CONFIGS["deepseek_v3"] = replace(
    CONFIGS["llama"],
    **{"tie_embeddings": False, "rope_interleaved": True, "dense_layers": (0,)},
    latent=LatentConfig(kv_rank=12, q_rank=10, nope_size=6, rope_size=4, value_size=5),
    moe=MoEConfig(
        **{"num_experts": 4, "expert_ffn_hidden_size": 24, "shared_expert_ffn_hidden_size": 24},
        **{"score": "sigmoid", "normalize_topk": True, "routed_scale": 2.5, "expert_bias": True},
        **{"num_groups": 2, "group_topk": 1},
    ),
)
CONFIGS["bert"] = GPTConfig(activation="gelu", bert=BertConfig(post_norm=True))
SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": None, "vocab_size": 131}


def written(name, path, config=None):
    """A directory of transformers as fastmp writes it, of random numbers, without that package."""
    from fastmp.hf.weight_io import name_mappings, own_tensors

    config = replace(config or CONFIGS[name], **SMALL, max_seq_len=32)
    generator, tensors = torch.Generator().manual_seed(3), {}
    for ours, shape in own_tensors(config).items():
        for link in name_mappings(name, config, ours, shape):
            tensors.setdefault(link.name, torch.randn(link.shape, generator=generator))
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(to_transformers(name, config, "float32")))
    return config, tensors


@pytest.mark.parametrize("name", CONFIGS)
def test_without_transformers_it_is_bitwise_too(name, tmp_path):
    config, tensors = written(name, tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), "--no-verify"]) == 0
    read = load_recipe(tmp_path / "model-fastmp" / "recipe.toml").model
    assert to_transformers(name, read, "float32") == to_transformers(name, config, "float32")
    assert main(["export", str(tmp_path / "model-fastmp"), str(tmp_path / "again"), "--no-verify"]) == 0
    again = files_of(tmp_path / "again")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[each], tensor) for each, tensor in tensors.items())


@needs_transformers
def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path, capsys):
    """Read without verification, written as DeepSeek-V3, which transformers loads and computes alike."""
    save("deepseek_v3, kimi", tmp_path / "model")
    before = files_of(tmp_path / "model")
    edit(tmp_path / "model" / "config.json", model_type="kimi_k2", auto_map={"AutoConfig": "a.B"})
    arguments = ["import", str(tmp_path / "model"), "--out", str(tmp_path / "ours")]
    assert main(arguments) == 2
    assert "transformers cannot load it" in capsys.readouterr().err
    assert main([*arguments, "--no-verify"]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    assert "verified: largest error of logits" in capsys.readouterr().out
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "deepseek_v3"
    again = files_of(tmp_path / "again")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


def test_experts_of_a_layer_may_be_in_one_tensor(tmp_path):
    _, tensors = written("qwen3_moe", tmp_path / "model")
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layer = "model.layers.1.mlp.experts"
    both = [
        torch.cat([tensors[f"{layer}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(4)
    ]
    fused[f"{layer}.gate_up_proj"] = torch.stack(both)
    fused[f"{layer}.down_proj"] = torch.stack([tensors[f"{layer}.{e}.down_proj.weight"] for e in range(4)])
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    readers = [TransformersReader(tmp_path / each) for each in ("model", "fused")]
    for name in readers[0].manifest.tensors:
        assert torch.equal(*(reader.tensor(name) for reader in readers)), name


def with_modules(path):
    """DeepSeek-V3 with an MTP module, as it is published: with copies of both vocabulary matrices."""
    _, tensors = written("deepseek_v3", path, replace(CONFIGS["deepseek_v3"], mtp_depth=1))
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    tensors |= {f"model.layers.2.{copy}": tensors[name].clone() for copy, name in copies.items()}
    save_file(tensors, path / "model.safetensors")
    return tensors


def test_mtp_modules_come_and_go(tmp_path):
    tensors = with_modules(tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), "--no-verify"]) == 0
    assert load_recipe(tmp_path / "model-fastmp" / "recipe.toml").model.mtp_depth == 1
    reader = TransformersReader(tmp_path / "model")
    model = GPT(reader.config)
    load_weights(reader, reader.config, [model], ParallelGroups.alone())
    (module,) = model.mtp
    assert torch.equal(module.proj.weight, tensors["model.layers.2.eh_proj.weight"])
    assert torch.equal(module.final_norm.weight, tensors["model.layers.2.shared_head.norm.weight"])
    (layer,) = module.layers
    assert torch.equal(layer.moe.experts.fc2[3], tensors["model.layers.2.mlp.experts.3.down_proj.weight"])
    assert main(["export", str(tmp_path / "model-fastmp"), str(tmp_path / "again"), "--no-verify"]) == 0
    again = files_of(tmp_path / "again")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[each], tensor) for each, tensor in tensors.items())


def test_mtp_modules_that_files_lack_or_that_have_other_embeddings(tmp_path):
    written("deepseek_v3", tmp_path / "without")
    edit(tmp_path / "without" / "config.json", num_nextn_predict_layers=1)  # as transformers writes it
    assert TransformersReader(tmp_path / "without").config.mtp_depth == 0
    tensors = with_modules(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(tensors | {"model.layers.2.embed_tokens.weight": torch.zeros(131, 16)}, file)
    with pytest.raises(
        ValueError, match=r"model.layers.2.embed_tokens.weight is not model.*--ignore num_nextn"
    ):
        TransformersReader(tmp_path / "model")
    left_out = TransformersReader(tmp_path / "model", ignored=["num_nextn_predict_layers"])
    assert left_out.config.mtp_depth == 0 and not any("mtp" in name for name in left_out.manifest.tensors)
    save_file({name: each for name, each in tensors.items() if "hnorm" not in name}, file)
    with pytest.raises(ValueError, match=r"model.layers.2.hnorm.weight is missing, which deepseek_v3 has"):
        TransformersReader(tmp_path / "model")


def test_a_family_without_modules_leaves_them_out():
    config = replace(CONFIGS["llama"], **SMALL, max_seq_len=32, mtp_depth=2)
    assert family_of(config) == family_of(replace(config, mtp_depth=0))
    assert family_of(replace(CONFIGS["deepseek_v3"], **SMALL, mtp_depth=1)) == "deepseek_v3"


def test_early_files_of_bert_have_other_names_and_more_in_them(tmp_path):
    """Norms have TensorFlow's names, and what is tied or a table of numbers is stored as well."""
    written("bert", tmp_path / "early")
    written("bert", tmp_path / "model")

    def change(stored):
        for name in list(stored):
            for kind, first in (("weight", "gamma"), ("bias", "beta")):
                if name.endswith(f"LayerNorm.{kind}"):
                    stored[name.removesuffix(kind) + first] = stored.pop(name)
        stored["cls.predictions.decoder.weight"] = stored["bert.embeddings.word_embeddings.weight"].clone()
        stored["cls.predictions.decoder.bias"] = stored["cls.predictions.bias"].clone()
        stored["bert.embeddings.position_ids"] = torch.arange(32)[None]

    change_tensors(tmp_path / "early" / "model.safetensors", change)
    edit(tmp_path / "early" / "config.json", architectures=["BertForMaskedLM"])
    early, model = (TransformersReader(tmp_path / each) for each in ("early", "model"))
    assert early.config == model.config and early.config.bert.sentence_order
    assert early.manifest.tensors.keys() == model.manifest.tensors.keys()
    for name in model.manifest.tensors:
        assert torch.equal(early.tensor(name), model.tensor(name)), name
    file = tmp_path / "early" / "model.safetensors"
    for name in ("cls.predictions.decoder.bias", "cls.predictions.decoder.weight"):
        stored = load_file(file)
        change_tensors(file, lambda tensors, name=name: tensors[name].add_(1))
        with pytest.raises(ValueError, match=f"{name} is not .*though config.json ties them"):
            TransformersReader(tmp_path / "early")
        save_file(stored, file)


def test_encoders_that_transformers_has_not_are_refused(tmp_path):
    config = replace(CONFIGS["bert"], **SMALL, max_seq_len=32)
    assert family_of(config) == "bert"
    others = [{"bert": BertConfig()}, {"bert": BertConfig(0, post_norm=True)}, {"activation": "gelu_tanh"}]
    for wrong in others:
        with pytest.raises(ValueError, match="no family of transformers computes this model"):
            family_of(replace(config, **wrong))
    written("bert", tmp_path / "model")
    for changes, said in (
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', fastmp computes gelu"),
        ({"tie_word_embeddings": False}, "tie_embeddings must be on beside bert"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0"),
        ({"type_vocab_size": 3}, "has shape .2, 16., config.json says .3, 16."),
    ):
        before = (tmp_path / "model" / "config.json").read_text()
        edit(tmp_path / "model" / "config.json", **changes)
        with pytest.raises(ValueError, match=said):
            TransformersReader(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text(before)


@needs_transformers
@pytest.mark.full
@pytest.mark.parametrize("name", ENCODERS)
def test_a_bert_in_float64_is_held_to_its_own_bound(name, tmp_path, capsys, monkeypatch):
    save(name, tmp_path / "model", torch.float64)
    edit(tmp_path / "model" / "config.json", layer_norm_eps=...)
    arguments = ["import", str(tmp_path / "model"), "--out"]
    assert main([*arguments, str(tmp_path / "ours")]) == 0
    assert float(re.search(r"largest error of logits (\S+),", capsys.readouterr().out)[1]) < 1e-12
    other = CONVERSIONS["bert"].fields["layer_norm_eps"]._replace(default=1e-7)
    monkeypatch.setitem(CONVERSIONS["bert"].fields, "layer_norm_eps", other)
    assert main([*arguments, str(tmp_path / "others")]) == 2
    assert "fastmp does not compute this model" in capsys.readouterr().err


def test_weights_are_the_start_of_a_run_and_another_model_is_refused(tmp_path):
    config, tensors = written("llama", tmp_path / "model")
    model = GPT(config, Placement(dtype=torch.float64))
    load_weights(TransformersReader(tmp_path / "model"), config, [model], ParallelGroups.alone())
    table = model.word_embedding.weight
    assert torch.equal(table[:131], tensors["model.embed_tokens.weight"].double()) and not table[131:].any()
    for change, said in (
        ({"rope_base": 5e5}, "it has rope_base=10000.0; this run has rope_base=500000.0"),
        ({"num_layers": 3}, "it has num_layers=2; this run has num_layers=3"),
    ):
        other = replace(config, **change)
        with pytest.raises(ValueError, match=f"another model: {re.escape(said)}"):
            load_weights(TransformersReader(tmp_path / "model"), other, [], ParallelGroups.alone())


def test_coefficients_of_balancing_losses_are_converted():
    config = replace(CONFIGS["qwen3_moe"], **SMALL)
    there = to_transformers("qwen3_moe", config, "float32")
    assert there["router_aux_loss_coef"] == pytest.approx(0.03 * 1 / 2)  # layers with experts over top_k
    assert from_transformers(there)[1].moe.aux_loss == pytest.approx(0.03)


def test_one_expert_of_a_token_is_described_and_trained_only_with_a_balancing_loss():
    there = to_transformers("qwen3_moe", replace(CONFIGS["qwen3_moe"], **SMALL), "float32")
    there |= {"num_experts_per_tok": 1, "norm_topk_prob": True}
    balanced = from_transformers(there)[1].moe
    assert balanced.aux_loss > 0 and not balanced.training_problem
    alone = from_transformers(there | {"router_aux_loss_coef": 0.0})[1].moe
    assert alone.top_k == 1 and "normalize_topk gives every expert the weight 1" in alone.training_problem
    weighted = from_transformers(there | {"router_aux_loss_coef": 0.0, "norm_topk_prob": False})[1].moe
    assert weighted.top_k == 1 and not weighted.training_problem


def edit(path, **changes):
    content = json.loads(path.read_text())
    content |= changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def change_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def index_to(*names):
    def change(path):
        tensors = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        save_file(tensors, path / "a.safetensors")
        weight_map = dict.fromkeys(tensors, names[0])
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def with_index_entry(path):
    index_to("a.safetensors")(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["more"] = "a.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


NORM = "model.norm.weight"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def test_layers_of_a_qwen3_moe_that_have_experts():
    """Every second one, from the second on, but for those that have an MLP by name."""
    config = replace(CONFIGS["qwen3_moe"], **SMALL | {"num_layers": 6})
    content = to_transformers("qwen3_moe", config, "float32")
    assert from_transformers(content)[1].dense_layers == (0,)
    content |= {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert from_transformers(content)[1].dense_layers == (0, 2, 3, 4)


def test_two_mscales_of_yarn_are_one_attention_factor():
    content = to_transformers("deepseek_v3", replace(CONFIGS["deepseek_v3"], **SMALL), "float32")
    table = {"rope_type": "yarn", "factor": math.e, "mscale": 2.0, "mscale_all_dim": 1.0}
    scaling = from_transformers(content | {"rope_parameters": table})[1].rope_scaling
    assert scaling.attention_factor == pytest.approx(1.2 / 1.1) and scaling.mscale_all_dim == 1.0


def test_a_factor_that_is_absent_is_derived_or_missed():
    """YaRN and LongRoPE have it in the lengths; transformers refuses the others."""
    content = to_transformers("llama", replace(CONFIGS["llama"], **SMALL, max_seq_len=4096), "float32")
    table = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert from_transformers(content | {"rope_parameters": table})[1].rope_scaling.factor == 64.0
    for kind, said in (
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("llama3", "factor and low_freq_factor and"),
    ):
        with pytest.raises(ValueError, match=f"rope_type '{kind}' needs {said}"):
            from_transformers(content | {"rope_parameters": {"rope_type": kind}})


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
@pytest.mark.parametrize("length", [0, -1, "64", True, [64]])
def test_an_original_length_that_is_none_is_refused_with_and_without_a_factor(kind, length):
    content = to_transformers("llama", replace(CONFIGS["llama"], **SMALL), "float32")
    for factor in (None, 4.0):
        table = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
        with pytest.raises(ValueError, match="original_max_position_embeddings must be a positive"):
            from_transformers(content | {"rope_parameters": table})


def test_gpt_oss_of_fewer_keys_or_in_mxfp4():
    """Windows alternate where a file names no layers; quantisation is a fact of the files alone."""
    content = {
        "model_type": "gpt_oss",
        **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 131},
        **{"intermediate_size": 48, "max_position_embeddings": 131072},
    }
    _, config = from_transformers(content)
    assert [layer.sliding_window for layer in config.layers] == [128, None, 128, None]
    assert config.rope_scaling == RopeScaling(
        "yarn", factor=32.0, original_max_seq_len=4096, beta_fast=32.0, beta_slow=1.0, truncate=False
    )
    assert from_transformers(content | {"quantization_config": {"quant_method": "mxfp4"}})[1] == config
    with pytest.raises(ValueError, match=r"swiglu_limit is 3\.0, fastmp computes 7\.0"):
        from_transformers(content | {"swiglu_limit": 3.0})


WRONG = {
    "unknown family": (
        lambda p: edit(p / "config.json", model_type="gemma"),
        "is not supported; expected one of gpt2",
    ),
    "no family": (lambda p: edit(p / "config.json", model_type=3), "model_type 3 is not supported"),
    "newer": (
        lambda p: edit(p / "config.json", logit_cap=5),
        "unknown 'logit_cap' in a configuration of llama",
    ),
    "bias": (lambda p: edit(p / "config.json", mlp_bias=True), "mlp_bias is True, fastmp computes False in"),
    "activation": (
        lambda p: edit(p / "config.json", hidden_act="relu"),
        "hidden_act is 'relu', fastmp computes",
    ),
    "missing": (lambda p: edit(p / "config.json", hidden_size=...), "hidden_size is missing"),
    "text": (
        lambda p: edit(p / "config.json", hidden_size="many"),
        "model.hidden_size must be of type int, got 'many'",
    ),
    "layers": (
        lambda p: edit(p / "config.json", num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000, but the files have 20 tensors",
    ),
    "rope": (
        lambda p: edit(p / "config.json", rope_parameters={"rope_type": "proportional"}),
        "rope_type is 'proportional', fastmp computes default, linear, dynamic, llama3, yarn, longrope",
    ),
    "longrope": (
        lambda p: edit(
            p / "config.json",
            rope_parameters={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2]},
        ),
        "rope_scaling has 1 factors for 2 frequencies of a head",
    ),
    "window": (
        lambda p: edit(p / "config.json", sliding_window=8),
        "sliding_window is 8, fastmp computes no window in llama",
    ),
    "windows": (
        lambda p: edit(
            p / "config.json",
            model_type="mistral",
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention"],
            **dict.fromkeys(("attention_bias", "mlp_bias"), ...),
        ),
        "sliding_window is that of 1 of 2 layers, fastmp has it in all of mistral",
    ),
    "kinds of layers": (
        lambda p: edit(
            p / "config.json",
            model_type="mistral",
            sliding_window=8,
            layer_types=["sliding_attention"],
            **dict.fromkeys(("attention_bias", "mlp_bias"), ...),
        ),
        "layer_types is a list of 1 for 2 layers",
    ),
    "attention": (
        lambda p: edit(p / "config.json", layer_types=["linear_attention", "full_attention"]),
        "layer_types is ['linear_attention', 'full_attention'], fastmp computes full_attention and",
    ),
    "no JSON": (lambda p: (p / "config.json").write_text("{"), "config.json: not JSON"),
    "padded": (
        lambda p: edit(p / "config.json", vocab_size=100),
        "model.embed_tokens.weight has shape [131, 16], config.json says [100, 16]",
    ),
    "lost": (
        lambda p: change_tensors(p / "model.safetensors", lambda t: t.pop(NORM)),
        "model.norm.weight is missing, which llama has",
    ),
    "left over": (
        lambda p: change_tensors(p / "model.safetensors", lambda t: t.update(more=torch.ones(2))),
        "unexpected 'more', which llama has not",
    ),
    "untied": (
        lambda p: change_tensors(
            p / "model.safetensors", lambda t: t.update({"lm_head.weight": t[TABLES[0]].clone().add_(1)})
        ),
        "lm_head.weight is not model.embed_tokens.weight, though config.json ties them",
    ),
    "tied in part": (  # the bytes that are there are equal
        lambda p: change_tensors(
            p / "model.safetensors", lambda t: t.update({"lm_head.weight": t[TABLES[0]][:5].clone()})
        ),
        "lm_head.weight is not model.embed_tokens.weight, though config.json ties them",
    ),
    "two dtypes": (
        lambda p: change_tensors(
            p / "model.safetensors",
            lambda t: t.update(
                {"model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].half()}
            ),
        ),
        "F16, F32 in what is one tensor here, layers.0.mlp.up.weight",
    ),
    "climbing": (
        index_to("../a.safetensors"),
        "'../a.safetensors' is not the name of a safetensors file beside",
    ),
    "absent file": (index_to("b.safetensors"), "b.safetensors cannot be read (No such file or directory)"),
    "index entry": (with_index_entry, "'more' is not in a.safetensors"),
    "pickled": (pickled, "pickled weights are never read"),
    "cut": (
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-5]),
        "bytes, its tensors end at",
    ),
    "no header": (
        lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 50),
        "is no safetensors file: a header",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_directory_is_one_line_and_nothing_is_written(name, tmp_path, capsys):
    written("llama", tmp_path / "model")
    change, said = WRONG[name]
    change(tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), "--no-verify"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("fastmp hf: ") and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


PREFIXES = {
    "_orig_mod.": "call save_pretrained of the model that torch.compile was given",
    "module.": "call save_pretrained of model.module",
    "module._orig_mod.": "call save_pretrained of model.module",
    "base_model.model.": "call merge_and_unload() of the PEFT model",
    "policy.": "remove it from all names",
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_prefix_of_all_names_is_said(family, tmp_path):
    """Of the wrapper that was saved in the place of the model, or that of the class without a head."""
    _, tensors = written(family, tmp_path / "model")
    file, first = tmp_path / "model" / "model.safetensors", next(iter(tensors))
    for prefix, said in PREFIXES.items():
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, file)
        with pytest.raises(
            ValueError, match=rf"{first} is stored as .*, with the prefix '{prefix}'; "
        ) as error:
            TransformersReader(tmp_path / "model")
        assert said in str(error.value) and str(error.value).startswith(str(file))
    if family != "gpt2":  # whose early files have no prefix
        save_file({name.partition(".")[2]: tensor for name, tensor in tensors.items()}, file)
        prefix = first.partition(".")[0]
        with pytest.raises(
            ValueError, match=rf"{first} is stored as .*, without the prefix '{prefix}\.'; load"
        ):
            TransformersReader(tmp_path / "model")


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_that_say_nothing_of_the_model_are_left_out(family, tmp_path):
    """Of the tools that wrote the files, and of text generation; others may change what is computed."""
    written(family, tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    said = from_transformers(content)
    words = {
        "unsloth_version": "2025.9.7",
        "unsloth_fixed": True,
        "_name_or_path": "x",
        "tokenizer_class": "T",
    }
    words |= {
        "auto_map": {"AutoModelForCausalLM": "modeling_x.X"},
        "_commit_hash": "1f2e",
        "temperature": 0.6,
    }
    words |= {"max_length": 20, "top_k": 50, "do_sample": False, "pruned_heads": {}, "torchscript": False}
    assert from_transformers(content | words) == said
    for key, value in (("pruned_heads", {"0": [1]}), ("tie_encoder_decoder", True), ("unsloth", 1)):
        with pytest.raises(ValueError, match=f"unknown '{key}'"):
            from_transformers(content | {key: value})


def test_activations_have_several_names():
    content = to_transformers("llama", replace(CONFIGS["llama"], **SMALL), "float32")
    for ours, names in {
        "swiglu": ("silu", "swish"),
        "geglu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"),
        "geglu_erf": ("gelu", "gelu_python"),
    }.items():
        assert {from_transformers(content | {"hidden_act": name})[1].activation for name in names} == {ours}


ODD = [None, True, -1, 0, 3, 10**12, 10**30, 1.5, math.inf, math.nan, "x", "", [], ["a"], {}, {"factor": "x"}]
OTHERS = ("rope_scaling", "sliding_window", "layer_types", "max_window_layers", "n_inner", "n_shared_experts")


@pytest.mark.parametrize("name", full(CONFIGS))
def test_any_value_in_a_configuration_is_read_or_refused_in_one_line(name, tmp_path):
    written(name, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    content = json.loads(path.read_text())
    for key in (*content, *OTHERS):
        for value in ODD:
            path.write_text(json.dumps(content | {key: value}))
            try:
                TransformersReader(tmp_path / "model")
            except ValueError as error:
                assert "\n" not in str(error), (key, value)


@pytest.mark.parametrize("name", full(["llama"]))
def test_any_damage_to_a_header_is_read_or_refused(name, tmp_path):
    written(name, tmp_path / "model")
    path, draw = tmp_path / "model" / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(end)
            damaged[at : at + 1] = draw.choice((b"", bytes([draw.randrange(256)]), b"9", b"]", b"-", b"e9"))
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            TransformersReader(tmp_path / "model")


def test_a_key_that_is_ignored_and_a_directory_that_is_there(tmp_path, capsys):
    written("llama", tmp_path / "model")
    edit(tmp_path / "model" / "config.json", logit_cap=5)
    arguments = ["import", str(tmp_path / "model"), "--no-verify", "--ignore", "logit_cap"]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "model-fastmp exists already; name a new directory" in capsys.readouterr().err


@needs_transformers
@pytest.mark.full
def test_a_model_that_computes_something_else_is_refused(tmp_path, capsys, monkeypatch):
    save("llama 3.1", tmp_path / "model")
    edit(tmp_path / "model" / "config.json")
    from fastmp.hf import config_json

    monkeypatch.setattr(config_json, "_rope", lambda *_: {"rope_base": 5e5})  # forgets the scaling
    assert main(["import", str(tmp_path / "model")]) == 2
    assert "fastmp does not compute this model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_verifying_needs_transformers(tmp_path, capsys, monkeypatch):
    written("llama", tmp_path / "model")
    from fastmp.hf import logit_check

    monkeypatch.setattr(logit_check, "find_spec", lambda name: None)
    assert main(["import", str(tmp_path / "model")]) == 2
    assert "transformers, which is not installed" in capsys.readouterr().err


LAYOUTS = [
    ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1}),
    ("qwen3_moe", {"pp": 2}),
    ("gpt2", {"tp": 2, "pp": 2}),
    ("bert", {"tp": 2, "pp": 2}),
]


def layout_case(rank, world, name, sizes, path):
    """Load a model of transformers into a layout, and save it from there."""
    groups = ParallelGroups.create(RankGrid(world_size=world, **sizes))
    reader = TransformersReader(path / "model")
    on = Placement(groups, rng=RngTracker(1, tp_rank=group_rank(groups.tp)))
    stages = (gpt_stages if reader.config.bert is None else bert_stages)(reader.config, on)
    load_weights(reader, reader.config, stages, groups)
    state = {f"model/{name}": param_shards(param, groups) for name, param in named_parameters(stages)}
    Checkpointer(path / "ours", groups=groups, **described(reader.config)).save(3, state, {})


@pytest.mark.parametrize(("name", "sizes"), [*full(LAYOUTS)])
def test_any_layout_reads_a_model_and_gives_it_back(name, sizes, tmp_path):
    _, tensors = written(name, tmp_path / "model")
    run_ranks(layout_case, prod([sizes.get("tp", 1), sizes.get("pp", 1)]), name, sizes, tmp_path)
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "again"), "--no-verify"]) == 0
    again = files_of(tmp_path / "again")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[each], tensor) for each, tensor in tensors.items())


def test_a_tied_head_that_is_stored_twice_is_read(tmp_path):
    _, tensors = written("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    change_tensors(file, lambda stored: stored.update({TABLES[1]: stored[TABLES[0]].clone()}))
    reader = TransformersReader(tmp_path / "model")
    assert torch.equal(reader.tensor("model/word_embedding.weight"), tensors[TABLES[0]])


def test_an_export_may_have_the_tokenizer_of_another_model(tmp_path, capsys):
    config, _ = written("llama", tmp_path / "model")
    files = {"tokenizer.json": "{}", "generation_config.json": "[1]", "chat_template.jinja": "{{ x }}"}
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(content)
    edit(tmp_path / "model" / "config.json", eos_token_id=[7, 9], bos_token_id=None)
    assert main(["import", str(tmp_path / "model"), "--no-verify"]) == 0
    arguments = ["export", str(tmp_path / "model-fastmp"), str(tmp_path / "again"), "--no-verify", "--like"]
    assert main([*arguments, str(tmp_path / "model-fastmp")]) == 2
    assert "has no tokenizer and no generation configuration" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    assert main([*arguments, str(tmp_path / "model")]) == 0
    for name, content in files.items():
        assert (tmp_path / "again" / name).read_text() == content
    there = json.loads((tmp_path / "again" / "config.json").read_text())
    assert there == to_transformers("llama", config, "float32") | {
        "eos_token_id": [7, 9],
        "bos_token_id": None,
    }


def resident(kind):
    """Bytes of memory: VmRSS now, VmHWM at most since it was reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{kind}:\s+(\d+) kB", status)[1])


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's")
def test_models_go_in_and_out_a_tensor_at_a_time(tmp_path, monkeypatch):
    large = {"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 4096, "vocab_size": 8192}
    for key, value in large.items():
        monkeypatch.setitem(SMALL, key, value)
    _, tensors = written("llama", tmp_path / "model")
    sizes = [tensor.nbytes for tensor in tensors.values()]
    del tensors
    for arguments in (
        ["import", str(tmp_path / "model")],
        ["export", str(tmp_path / "model-fastmp"), str(tmp_path / "again")],
    ):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        assert main([*arguments, "--no-verify"]) == 0
        assert resident("VmHWM") - before < sum(sizes) / 2  # an allocator keeps some of what is let go


@pytest.mark.exhaustive
def test_a_run_begins_with_imported_weights(tmp_path):
    """The first loss is that of the imported model, whatever the seed of the run."""
    written("qwen3_moe", tmp_path / "model")
    edit(tmp_path / "model" / "config.json", vocab_size=257)
    change_tensors(
        tmp_path / "model" / "model.safetensors",
        lambda t: t.update({n: torch.randn(257, 16) for n in TABLES if n in t}),
    )
    assert main(["import", str(tmp_path / "model"), "--no-verify"]) == 0
    recipe = tmp_path / "model-fastmp" / "recipe.toml"
    losses = {}
    for name, options in {
        "checkpoint": ["--train.seed", "1"],
        "directory": ["--train.seed", "2", "--init-from", str(tmp_path / "model")],
        "none": ["--train.seed", "2", "--init-from", ""],
    }.items():
        train = (
            f"--recipe {recipe} --name {name} --train.run-dir {tmp_path} --steps 1 --train.eval-interval 0"
        )
        command = [sys.executable, "-m", "fastmp", "train", *train.split(), *options]
        command += ["--data.seq-len", "32", "--data.seed", "3"]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = next(record["loss"] for record in records if record["kind"] == "train")
    assert losses["checkpoint"] == losses["directory"] != losses["none"]
