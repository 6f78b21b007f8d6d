"""Files of models of transformers that say what cannot be: one ValueError that names the file and the key."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fastmp.config import GPTConfig, MoEConfig
from fastmp.hf.config_json import family_of, to_transformers
from fastmp.hf.weight_io import TransformersReader, name_mappings, own_tensors

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 40, "max_seq_len": 32}
ROPE = {
    "norm": "rmsnorm",
    "position": "rope",
    "linear_bias": False,
    "activation": "swiglu",
    "tie_embeddings": False,
}
MODELS = {
    "gpt2": GPTConfig(**SIZES),
    "llama": GPTConfig(**SIZES, **ROPE, ffn_hidden_size=24),
    "qwen3_moe": GPTConfig(
        **SIZES,
        **ROPE,
        ffn_hidden_size=24,
        qk_norm=True,
        moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=8),
    ),
}
COUNTS = {
    "gpt2": ("vocab_size", "n_embd", "n_inner", "n_layer", "n_head", "n_positions"),
    "llama": (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    ),
    "qwen3_moe": ("num_experts", "moe_intermediate_size", "num_experts_per_tok", "vocab_size"),
}


def written(kind, path):
    """A directory of the model, with zeros for weights."""
    path.mkdir()
    config = MODELS[kind]
    assert family_of(config) in (kind, "llama")
    tensors = {
        link.name: torch.zeros(link.shape)
        for name, shape in own_tensors(config).items()
        for link in name_mappings(kind, config, name, shape)
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(to_transformers(kind, config, "float32")))
    TransformersReader(path)
    return path


@pytest.mark.parametrize("kind", COUNTS)
def test_sizes_that_no_file_bears_out_are_named_before_a_model_is_made(kind, tmp_path, monkeypatch):
    path = written(kind, tmp_path / "model") / "config.json"
    content, made = json.loads(path.read_text()), []
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_: made.append(1))
    for key in COUNTS[kind]:
        for size in (1000, 2**31, 2**40, 2**63 - 1, 2**63, 10**30):
            path.write_text(json.dumps(content | {key: size}))
            with pytest.raises(ValueError, match=f": {key} is {repr(size)[:12]}") as raised:
                TransformersReader(path.parent)
            assert str(path) in str(raised.value) and "\n" not in str(raised.value) and not made


def header_of(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(path, text, data):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


NORM = "model.norm.weight"


def changed(**change):
    def write(path):
        header, data = header_of(path)
        put(path, header | {NORM: header[NORM] | change}, data)

    return write


def more(name, **entry):
    def write(path):
        header, data = header_of(path)
        put(path, header | {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | entry}, data)

    return write


def rewritten(change):
    def write(path):
        header, data = header_of(path)
        put(path, *change(header, data))

    return write


def twice(header, data):
    text = json.dumps(header).encode()
    entry = json.dumps({NORM: header[NORM]}).encode()
    return text[:-1] + b", " + entry[1:], data


HEADERS = {
    "bytes behind": rewritten(lambda header, data: (header, data + b"\0" * 4)),
    "bytes missing": rewritten(lambda header, data: (header, data[:-4])),
    "a range of nobody": rewritten(
        lambda header, data: ({name: each for name, each in header.items() if name != NORM}, data)
    ),
    "a range twice": more("extra", shape=[16], data_offsets=[0, 64]),
    "a range inside": changed(shape=[8]),
    "three ends": changed(data_offsets=[0, 64, 64]),
    "one end": changed(data_offsets=[0]),
    "backwards": changed(data_offsets=[64, 0]),
    "negative": changed(shape=[-4, -4]),
    "fractions": changed(shape=[16.0]),
    "text": changed(shape=["16"]),
    "truth": changed(shape=[True, 16]),
    "no list": changed(shape="16"),
    "another key": changed(stride=[1]),
    "a dtype that is no name": changed(dtype=["F32"]),
    "an unknown dtype": changed(dtype="F7"),
    "a name twice": rewritten(twice),
    "metadata of numbers": more("__metadata__"),
    "text behind": rewritten(lambda header, data: (json.dumps(header).encode() + b"\n", data)),
    "text before": rewritten(lambda header, data: (b" " + json.dumps(header).encode(), data)),
    "a list": rewritten(lambda header, data: (b"[]", data)),
}


def test_a_header_that_does_not_describe_its_file_is_named(tmp_path):
    path = written("llama", tmp_path / "model") / "model.safetensors"
    whole = path.read_bytes()
    for name, change in HEADERS.items():
        path.write_bytes(whole)
        change(path)
        with pytest.raises(ValueError, match=r"model\.safetensors") as raised:
            TransformersReader(path.parent)
        assert str(path) in str(raised.value) and "\n" not in str(raised.value), name


def test_spaces_behind_a_header_and_metadata_are_read(tmp_path):
    path = written("llama", tmp_path / "model") / "model.safetensors"
    header, data = header_of(path)
    put(path, json.dumps(header | {"__metadata__": {"format": "pt"}}).encode() + b"  ", data)
    TransformersReader(path.parent)
