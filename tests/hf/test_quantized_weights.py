"""Weights in FP8 and MXFP4 files, against their definition and against transformers' own dequantisation."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
import torch
from hf_models import MODELS, save
from safetensors.torch import load_file, save_file

from fastmp.apps.hf import main
from fastmp.config import GPTConfig, LatentConfig, MoEConfig
from fastmp.hf.config_json import to_transformers
from fastmp.hf.quantized import _from_mxfp4
from fastmp.hf.weight_io import TransformersReader, name_mappings, own_tensors
from fastmp.training.checkpoint.storage import ShardedTensorRef

MIXTURE = GPTConfig(
    **{"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 131, "max_seq_len": 32},
    **{"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "linear_bias": False},
)
CONFIGS = {
    "deepseek_v3": replace(
        MIXTURE,
        **{"tie_embeddings": False, "rope_interleaved": True, "dense_layers": (0,), "mtp_depth": 1},
        latent=LatentConfig(kv_rank=36, q_rank=20, nope_size=12, rope_size=4, value_size=10),
        moe=MoEConfig(
            **{"num_experts": 4, "expert_ffn_hidden_size": 40, "shared_expert_ffn_hidden_size": 40},
            **{"score": "sigmoid", "normalize_topk": True, "expert_bias": True},
        ),
    ),
    "gpt_oss": replace(
        MIXTURE,
        **{"hidden_size": 64, "activation": "clamped_swiglu", "linear_bias": True, "attention_sinks": True},
        moe=MoEConfig(
            **{"num_experts": 3, "expert_ffn_hidden_size": 32, "pre_softmax": False},
            **{"linear_bias": True, "router_bias": True},
        ),
    ),
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
PLAIN = re.compile(r"embed|_head|norm|mlp\.gate\.|router")  # which files keep in BF16


def quantised(family, path, block=(128, 128)):
    """Put the matrices of a directory of one file into low precision; return {name: float32 weight}."""
    tensors, wide, generator = load_file(path / "model.safetensors"), {}, torch.Generator().manual_seed(7)
    for name, tensor in list(tensors.items()):
        if family == "gpt_oss" and name.endswith("_proj") and tensor.ndim == 3:
            del tensors[name]
            experts, columns, rows = tensor.shape
            groups = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(115, 124, groups, dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wide[name] = mxfp4(blocks, scales)
        elif family != "gpt_oss" and tensor.ndim == 2 and not PLAIN.search(name):
            values = (tensor * 100).to(torch.float8_e4m3fn)
            sizes = [-(-size // of) for size, of in zip(tensor.shape, block, strict=True)]
            scales = torch.rand(sizes, generator=generator) / 100 + 0.002
            tensors |= {name: values, f"{name}_scale_inv": scales}
            factors = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            wide[name] = values.float() * factors[: tensor.shape[0], : tensor.shape[1]]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    table = FP8 | {"weight_block_size": list(block)} if family != "gpt_oss" else {"quant_method": "mxfp4"}
    edit(path, quantization_config=table)
    return wide


def mxfp4(blocks, scales):
    """The definition, a number at a time: sign, two bits of exponent, one of mantissa; (E, columns, rows)."""
    experts, rows, groups, _ = blocks.shape
    out = torch.empty(experts, groups * 32, rows)
    for e, r, g in torch.cartesian_prod(*(torch.arange(size) for size in (experts, rows, groups))).tolist():
        for at, byte in enumerate(blocks[e, r, g].tolist()):
            for half, bits in enumerate((byte & 15, byte >> 4)):
                exponent, mantissa = bits >> 1 & 3, bits & 1
                size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                number = (-size if bits & 8 else size) * 2.0 ** (int(scales[e, r, g]) - 127)
                out[e, 32 * g + 2 * at + half, r] = number
    return out


def edit(path, **changes):
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(content))


def written(family, path, block=(128, 128)):
    """A directory of random weights in low precision, and its weights by fastmp's names in float32."""
    config, generator, tensors = CONFIGS[family], torch.Generator().manual_seed(3), {}
    for ours, shape in own_tensors(config).items():
        for link in name_mappings(family, config, ours, shape):
            tensors.setdefault(link.name, torch.randn(link.shape, generator=generator).bfloat16())
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(to_transformers(family, config, "bfloat16")))
    return {name: tensor.float() for name, tensor in tensors.items()} | quantised(family, path, block)


def read(reader):
    """Every tensor of a reader, whole."""
    found = {}
    for name, tensor in reader.manifest.tensors.items():
        found[name] = torch.empty(tensor.shape)
        reader.read({name: ShardedTensorRef.whole(found[name])})
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "block"), [("deepseek_v3", (16, 32)), ("gpt_oss", None)])
def test_files_in_low_precision_are_read_by_their_definition(family, block, dtype, tmp_path):
    """The last blocks are smaller. In BF16 FP8 weights are rounded once; MXFP4 weights are exact."""
    weights = written(family, tmp_path / "model", block)
    edit(tmp_path / "model", torch_dtype=dtype)
    reader, config = TransformersReader(tmp_path / "model"), CONFIGS[family]
    found = read(reader)
    for ours, shape in own_tensors(config).items():
        saved = reader.manifest.tensors[f"model/{ours}"]
        for link in name_mappings(family, config, ours, shape):
            box = tuple(slice(at, at + size) for at, size in zip(*link.ours, strict=True))
            there = tuple(slice(at, at + size) for at, size in zip(*link.theirs, strict=True))
            wanted = weights[link.name][there]
            if saved.dtype == "BF16" and family != "gpt_oss":
                wanted = wanted.bfloat16().float()
            assert torch.equal(link.view(found[f"model/{ours}"][box]), wanted), ours


@pytest.mark.parametrize("scale", [0, 1, 127, 251])
def test_every_byte_is_exact_in_bf16(scale):
    """Down to subnormal numbers."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.full((1, 1, 16), scale, dtype=torch.uint8)
    found, wanted = _from_mxfp4(blocks[0], scales[0]), mxfp4(blocks, scales)[0].t()
    assert (
        torch.equal(found.float(), wanted) and wanted.isfinite().all() and wanted[wanted != 0].numel() == 448
    )


@pytest.mark.parametrize(("family", "block"), [("deepseek_v3", (16, 32)), ("gpt_oss", None)])
def test_any_chunk_is_a_part_of_the_whole(family, block, tmp_path):
    """Shards begin and end within blocks, and within the bytes of two numbers."""
    written(family, tmp_path / "model", block)
    reader, draw = TransformersReader(tmp_path / "model"), random.Random(5)
    for name, whole in read(reader).items():
        for _ in range(3):
            bounds = [sorted(draw.sample(range(size + 1), 2)) for size in whole.shape]
            part = whole[tuple(slice(*each) for each in bounds)].clone().fill_(torch.nan)
            starts = tuple(start for start, _ in bounds)
            reader.read({name: ShardedTensorRef(tuple(whole.shape), part.dtype, [(starts, part)])})
            assert torch.equal(part, whole[tuple(slice(*each) for each in bounds)]), name


def test_import_writes_dequantised_weights(tmp_path, capsys):
    written("gpt_oss", tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), "--no-verify"]) == 0
    assert main(["export", str(tmp_path / "model-fastmp"), str(tmp_path / "again"), "--no-verify"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    before, after = (read(TransformersReader(tmp_path / name)) for name in ("model", "again"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def stored(change):
    def changed(path):
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return changed


def configured(**table):
    return lambda path: edit(path, quantization_config=FP8 | {"weight_block_size": [16, 32]} | table)


DOWN = "model.layers.0.mlp.down_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
WRONG = {
    "method": ("deepseek_v3", configured(quant_method="gptq"), "quant_method 'gptq' is not supported"),
    "no method": ("gpt_oss", lambda p: edit(p, quantization_config={}), "quant_method None is not supported"),
    "no table": ("gpt_oss", lambda p: edit(p, quantization_config=3), "must be a table, got 3"),
    "no block": ("deepseek_v3", configured(weight_block_size=None), "weight_block_size is None"),
    "flat block": ("deepseek_v3", configured(weight_block_size=[128]), r"weight_block_size is \[128\]"),
    "static": (
        "deepseek_v3",
        configured(activation_scheme="static"),
        "activation_scheme is 'static', fastmp reads dynamic",
    ),
    "not said": (
        "deepseek_v3",
        lambda p: edit(p, quantization_config=None),
        "is F8_E4M3, which fastmp reads of a matrix where config.json has",
    ),
    "other method": ("deepseek_v3", configured(quant_method="mxfp4"), "quantization_config of .fp8."),
    "no factors": (
        "deepseek_v3",
        stored(lambda t: t.pop(f"{DOWN}_scale_inv")),
        r"down_proj.weight_scale_inv is missing, expected \[3, 6\]: a factor for each block of 16 x 32",
    ),
    "other blocks": (
        "deepseek_v3",
        configured(weight_block_size=[32, 32]),
        r"weight_scale_inv has shape \[\d+, \d+\], expected \[\d+, \d+\]: a factor for each block of 32 x 32",
    ),
    "packed factors": (
        "deepseek_v3",
        stored(lambda t: t.update({f"{DOWN}_scale_inv": t[f"{DOWN}_scale_inv"].to(torch.float64)})),
        "weight_scale_inv is F64, expected F32 or BF16 or F16",
    ),
    "left over": (
        "deepseek_v3",
        stored(lambda t: t.update({DOWN: t[DOWN].bfloat16()})),
        "unexpected 'model.layers...ght_scale_inv', which deepseek_v3 has not",
    ),
    "no exponents": (
        "gpt_oss",
        stored(lambda t: t.pop(f"{EXPERTS}_scales")),
        r"down_proj_scales is missing, expected \[3, 64, 1\]: an exponent for each 32 numbers",
    ),
    "exponents": (
        "gpt_oss",
        stored(lambda t: t.update({f"{EXPERTS}_scales": t[f"{EXPERTS}_scales"][:2].clone()})),
        r"down_proj_scales has shape \[2, 64, 1\], expected \[3, 64, 1\]",
    ),
    "bytes": (
        "gpt_oss",
        stored(lambda t: t.update({f"{EXPERTS}_blocks": t[f"{EXPERTS}_blocks"].flatten(-2)})),
        r"down_proj_blocks has shape \[3, 64, 16\], expected \[3, 64, 1, 16\]: 16 bytes for 32 numbers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_in_low_precision_are_one_line(name, tmp_path):
    family, change, said = WRONG[name]
    written(family, tmp_path / "model", (16, 32))
    change(tmp_path / "model")
    with pytest.raises(ValueError, match=said) as error:
        TransformersReader(tmp_path / "model")
    assert "\n" not in str(error.value)


ALIGNED = {
    "deepseek_v3": {
        **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8},
        "v_head_dim": 16,
    },
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16},
}


@pytest.mark.full
@pytest.mark.parametrize("family", ALIGNED)
def test_transformers_dequantises_to_the_same_bits(family, tmp_path, capsys, monkeypatch):
    """And computes the same logits with them. Its blocks divide the matrices."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind, values = MODELS[family]
    monkeypatch.setitem(MODELS, family, (kind, values | ALIGNED[family]))
    save(family, tmp_path / "model", torch.bfloat16)
    quantised(family, tmp_path / "model", (8, 16))
    assert main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "ours")]) == 0
    assert "verified: largest error of logits" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    theirs = {name: tensor for name, tensor in theirs.state_dict().items() if tensor.is_floating_point()}
    reader = TransformersReader(tmp_path / "model")
    found, config = read(reader), reader.config
    compared = 0
    for ours, shape in own_tensors(config).items():
        fused = ".experts." in ours
        for link in name_mappings(family, config, ours, shape, fused=fused):
            box = tuple(slice(at, at + size) for at, size in zip(*link.ours, strict=True))
            there = tuple(slice(at, at + size) for at, size in zip(*link.theirs, strict=True))
            assert torch.equal(link.view(found[f"model/{ours}"][box]), theirs[link.name][there].float()), ours
            compared += 1
    assert compared > 20
