"""The comparison of logits at import and export, and what import takes for granted of transformers."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hf_models import LLAMA3, LONGROPE, MODELS, SIZES, save
from safetensors.torch import load_file, save_file

from fastmp.apps.hf import main
from fastmp.hf import config_json
from fastmp.hf.families import CONVERSIONS
from fastmp.nn.core_attention import CoreAttention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new"])
def test_names_of_the_same_activation_are_all_that_transformers_has(name):
    from transformers.activations import ACT2CLS, ACT2FN

    x = torch.linspace(-20, 20, 1000, dtype=torch.float64)
    wanted = ACT2FN[name](x)
    same = set()
    for each in set(ACT2CLS) - {"xielu"}:  # which has parameters in BF16
        found = ACT2FN[each].double()(x) if isinstance(ACT2FN[each], torch.nn.PReLU) else ACT2FN[each](x)
        if (found - wanted).abs().max() < 1e-9:
            same.add(each)
    aliases = {alias for alias, of in config_json._ACTIVATIONS.items() if of == name}
    assert same == {name} | aliases | ({"gelu_pytorch_tanh"} if name == "gelu_new" else set())


# of padding in training, of losses, of the heads of other tasks, and of a split that changes nothing
READ = {"pad_token_id", "use_cache", "output_router_logits", "problem_type", "classifier_dropout"}
READ |= {"chunk_size_feed_forward", "is_encoder_decoder", "reorder_and_upcast_attn", "_attn_implementation"}


@pytest.mark.parametrize("family", sorted(CONVERSIONS.keys() - {"kimi_k2"}))
def test_no_model_reads_the_keys_that_import_leaves_out(family):
    source = Path(find_spec(f"transformers.models.{family}.modeling_{family}").origin).read_text()
    read = set(re.findall(r"config\.(\w+)", source))
    assert len(read) > 10
    left_out = {key for key in read if key in config_json._UNUSED | config_json._GENERATION}
    assert {key for key in left_out if not key.startswith("summary_")} <= READ


LONG = SIZES | {"max_position_embeddings": 32768}
FAR = {  # models in whose first tokens neither windows nor original lengths show
    "mistral": ("Mistral", LONG | {"sliding_window": 4096}),
    "qwen3": (
        "Qwen3",
        LONG
        | {"sliding_window": 4096, "use_sliding_window": True, "head_dim": 6}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt_oss": ("GptOss", MODELS["gpt_oss"][1] | LONG | {"sliding_window": 128}),
    "llama 3.1": (
        "Llama",
        LONG | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 5e9}},
    ),
    "llama": (
        "Llama",
        LONG | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 4096}},
    ),
    "llama, dynamic": (
        "Llama",
        LONG | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
}


def scaled(**changes):
    """A fault in the translation of rotary scaling."""

    def fault(model):
        scaling = model["rope_scaling"]
        return model | {"rope_scaling": scaling | {name: of(scaling[name]) for name, of in changes.items()}}

    return "_rope", fault


FAULTS = {
    "no window": ("mistral", ("_window", lambda model: {})),
    "one token less": (
        "mistral",
        ("_window", lambda model: model | {"sliding_window": model["sliding_window"] - 1}),
    ),
    "windows everywhere": ("qwen3", ("_window", lambda model: model | {"full_attention_layers": []})),
    "windows in other layers": (
        "gpt_oss",
        ("_window", lambda model: model | {"full_attention_layers": [0, 2]}),
    ),
    "short factors alone": ("llama", scaled(long_factor=lambda _: LONGROPE["short_factor"])),
    "twice the length": ("llama 3.1", scaled(original_max_seq_len=lambda length: 2 * length)),
    "another growth": ("llama, dynamic", scaled(factor=lambda _: 2.0)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_what_shows_after_thousands_of_tokens_is_compared(name, tmp_path, capsys, monkeypatch):
    """Windows and scaled positions of the sizes of real models, within a few tokens."""
    model, (function, fault) = FAULTS[name]
    monkeypatch.setitem(MODELS, model, FAR[model])
    save(model, tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "right")]) == 0
    assert main(["export", str(tmp_path / "right"), str(tmp_path / "again")]) == 0
    capsys.readouterr()
    right = getattr(config_json, function)
    monkeypatch.setattr(config_json, function, lambda *args: fault(right(*args)))
    assert main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "wrong")]) == 2
    said = capsys.readouterr().err
    assert "fastmp does not compute this model" in said
    assert re.search(r", with .*(sliding_window 5|max_position_embeddings \d\d)", said)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.full
@pytest.mark.parametrize("more", [-1, 1])
def test_a_window_that_is_computed_wrongly_is_noticed(more, tmp_path, capsys, monkeypatch):
    """Of one token more or less, where the translation is right; weights of a checkpoint too."""
    monkeypatch.setitem(MODELS, "mistral", FAR["mistral"])
    save("mistral", tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "right")]) == 0
    make = CoreAttention.__init__

    def wrong(self, config, *args, **options):
        make(self, replace(config, sliding_window=config.sliding_window + more), *args, **options)

    monkeypatch.setattr(CoreAttention, "__init__", wrong)
    for command in (["import", "model", "--out", "wrong"], ["export", "right", "wrong"]):
        assert (
            main([each if "-" in each or each == command[0] else str(tmp_path / each) for each in command])
            == 2
        )
        assert "with sliding_window 5, more than" in capsys.readouterr().err
        assert not (tmp_path / "wrong").exists()


@pytest.mark.full
def test_weights_that_are_not_finite_are_named(tmp_path, capsys):
    save("qwen3_moe", tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = load_file(file)
    tensors[name][3, 4:6] = torch.nan
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["import", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "does not compute" not in said and "there are no logits to compare; pass --no-verify" in said
    assert f"{file}: {name} has 2 numbers that are NaN or infinite, and so have model.norm.weight, so" in said
    tensors["model.norm.weight"][0] = 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["import", str(tmp_path / "model")]) == 2
    assert f"{file}: {name} has 2 numbers that are NaN or infinite, so" in capsys.readouterr().err
