"""Tensors in files of transformers that have another shape than config.json says: none is ever read."""

from __future__ import annotations

import json
import re
from math import prod

import pytest
from hf_models import ENCODERS, MODELS
from marks import full

from fastmp.apps.generate import main as generate
from fastmp.apps.generation.trained_models import open_reader
from fastmp.apps.hf import main
from fastmp.hf import weight_io
from fastmp.hf.config_json import from_transformers
from fastmp.hf.families import CONVERSIONS
from fastmp.hf.stored import stored_tensors
from fastmp.hf.weight_io import TransformersReader, name_mappings, own_tensors

KNOWN = {re.split("[ ,]", name)[0]: values for name, (_, values) in (MODELS | ENCODERS).items()}
KNOWN["kimi_k2"] = KNOWN["deepseek_v3"]
SMALL = {  # one layer of each kind, two experts
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_nextn_predict_layers", "max_window_layers"), 1),
}
BLOCK = (5, 8)
QUANTISED = {
    "plain": {},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
}
BYTES = {"F32": 4, "F8_E4M3": 1, "U8": 1}
BUFFER = "rotary_emb.inv_freq"  # which files of old versions have
FILES = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]


def tensors_of(family, form):
    """Return config.json, and {name: (dtype, shape)} of the tensors that a file of the family has."""
    content = KNOWN[family] | {key: value for key, value in SMALL.items() if key in KNOWN[family]}
    if form == "mxfp4":
        content |= {"hidden_size": 32, "intermediate_size": 64}
    content |= {"model_type": family, "vocab_size": 131, **QUANTISED[form]}
    _, config = from_transformers(content)
    found = {BUFFER: ("F32", (1000,))}  # longer than each size of config.json
    for ours, ours_shape in own_tensors(config).items():
        for link in name_mappings(family, config, ours, ours_shape):
            name, shape = link.name, link.shape
            if form == "mxfp4" and len(shape) == 3:
                experts, columns, rows = shape
                found[f"{name}_blocks"] = ("U8", (experts, rows, columns // 32, 16))
                found[f"{name}_scales"] = ("U8", (experts, rows, columns // 32))
            elif form == "fp8" and len(shape) > 1:
                blocks = [-(-size // of) for size, of in zip(shape[-2:], BLOCK, strict=True)]
                found[name] = ("F8_E4M3", shape)
                found[f"{name}_scale_inv"] = ("F32", (*shape[:-2], *blocks))
            else:
                found[name] = ("F32", shape)
    return content, found


def write(path, content, tensors):
    """Write a directory of two files without numbers: holes in the place of the tensors' bytes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(content))
    weight_map = {name: FILES[number % 2] for number, name in enumerate(tensors)}
    for file in FILES:
        header, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            if weight_map[name] == file:
                start, end = end, end + prod(shape) * BYTES[dtype]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(path / file, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def others(shape):
    """Return other shapes: some of as many elements, some that end before the bytes that are expected."""
    rows = shape[0]
    found = [(rows - 1, *shape[1:]), (1, *shape[1:]), (1, *shape), (prod(shape),)]
    found += [(*shape[:-2], *shape[:-3:-1])]  # transposed
    return [each for each in dict.fromkeys(found) if each != shape]


SHOWN = [("gpt2", "plain"), ("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4")]
CASES = [(family, form) for family in CONVERSIONS for form in ("plain", "fp8")]


@pytest.mark.parametrize(("family", "form"), [*SHOWN, *full([case for case in CASES if case not in SHOWN])])
def test_any_other_shape_of_any_tensor_is_one_line(family, form, tmp_path, monkeypatch):
    """It names the file and the tensor, before anything is read."""
    path = tmp_path / "model"
    write(path, *tensors_of(family, form))
    own, stored = own_tensors(TransformersReader(path).config), stored_tensors(path)
    headers = dict(stored)
    monkeypatch.setattr(weight_io, "own_tensors", lambda config: own)
    monkeypatch.setattr(weight_io, "stored_tensors", lambda path: headers)
    monkeypatch.setattr(weight_io.ChunkReader, "read", None)
    for name, (file, _, shape, _) in stored.items():
        for other in others(shape) if name != BUFFER else ():
            headers[name] = stored[name]._replace(shape=other)
            with pytest.raises(ValueError, match=re.escape(f"{name} has shape {list(other)}")) as raised:
                TransformersReader(path)
            said = str(raised.value)
            assert said.startswith(f"{path / file}: ") and "\n" not in said
            assert re.search(rf"(config.json says|expected) {re.escape(str(list(shape)))}", said)
        headers[name] = stored[name]


@pytest.mark.parametrize(("family", "form"), SHOWN)
def test_every_command_refuses_it(family, form, tmp_path, capsys):
    """A matrix of one row, which would be read on into the bytes of its neighbours."""
    content, tensors = tensors_of(family, form)
    name = next(name for name, (_, shape) in tensors.items() if len(shape) > 1 and ".1." in name)
    dtype, (_, *rest) = tensors[name]
    write(tmp_path / "model", content, tensors | {name: (dtype, (1, *rest))})
    model = str(tmp_path / "model")
    said = f"{name} has shape {[1, *rest]}"
    assert main(["import", model, "--no-verify", "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="2"):
        generate(["--hf", model, "--tokenizer", "byte", "--prompt", "a"])
    assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(said)):  # as of --init-from
        open_reader(model, None)
