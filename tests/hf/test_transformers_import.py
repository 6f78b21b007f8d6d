"""Imported models beside transformers' own: gradients, balancing losses, and what absent values mean."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_models import ENCODERS, MODELS, SIZES, Float64, save

from fastmp.apps.hf import main
from fastmp.config import DataConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.hf.config_json import from_transformers
from fastmp.hf.weight_io import TransformersReader, export_weights
from fastmp.nn import GPT, Placement
from fastmp.optim.named_params import named_buffers, named_parameters
from fastmp.training.checkpoint.checkpointer import Checkpointer, described
from fastmp.training.checkpoint.model_weights import load_weights
from fastmp.training.checkpoint.state import param_shards
from fastmp.training.checkpoint.storage import ShardedTensorRef
from fastmp.training.data.dataset import TokenDataset
from fastmp.training.metrics import read_metrics

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def without_dropout(name):
    """The model in float64 throughout, its rotary positions too."""
    family, values = MODELS[name]
    drops = ("attn_pdrop", "embd_pdrop", "resid_pdrop") if family == "GPT2" else ("attention_dropout",)
    return family, values | dict.fromkeys(drops, 0.0)


def imported(path, config=None):
    reader = TransformersReader(path)
    model = GPT(config or reader.config, Placement(dtype=torch.float64)).train()
    load_weights(reader, model.config, [model], ParallelGroups.alone())
    return model


def both(name, path, monkeypatch, **changes):
    family, values = without_dropout(name)
    monkeypatch.setitem(MODELS, name, (family, values | changes))
    with Float64():
        theirs = save(name, path, torch.float64).train()
    if hasattr(theirs.config, "num_experts_per_tok"):
        theirs.set_experts_implementation("eager")  # the others take no float64
    return theirs, imported(path)


def batch_of(config):
    tokens = torch.randint(config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(3))
    return tokens, torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_every_gradient_are_those_of_transformers(name, tmp_path, monkeypatch):
    theirs, ours = both(name, tmp_path / "model", monkeypatch)
    tokens, targets = batch_of(ours.config)
    with Float64():
        expected = theirs(input_ids=tokens, labels=tokens).loss
        expected.backward()
    losses = ours.loss(tokens, targets)
    loss = (losses if ours.config.moe is None else losses.tokens).sum() / (targets >= 0).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)

    with torch.no_grad():  # their gradients, written and read as weights are: by name
        for tensor in [*theirs.parameters(), *theirs.buffers()]:
            tensor.copy_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted = dict(imported(tmp_path / "gradients").named_parameters())
    largest = max(tensor.abs().max() for tensor in wanted.values())
    for parameter_name, parameter in ours.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (grad - wanted[parameter_name]).abs().max() <= 1e-9 * largest, parameter_name


CURVES = ("llama", "qwen3_moe", "deepseek_v2", "deepseek_v3, yarn", "glm4_moe", "gpt_oss")


@pytest.mark.full
@pytest.mark.parametrize("name", CURVES)
def test_forty_steps_are_those_of_transformers(name, tmp_path, monkeypatch):
    """Every loss of both models under AdamW; after five steps, transformers loads what ours exports."""
    theirs, ours = both(name, tmp_path / "model", monkeypatch)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1)
        for model in (theirs, ours)
    ]
    generator, curve = torch.Generator().manual_seed(5), []
    for step in range(40):
        tokens = torch.randint(20, (2, 20), generator=generator)  # of few tokens, to be learnt
        with Float64():
            expected = theirs(input_ids=tokens, labels=tokens).loss
            expected.backward()
        losses = ours.loss(tokens[:, :-1], tokens[:, 1:])
        loss = (losses if ours.config.moe is None else losses.tokens).mean()
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-8), step
        curve.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 4:
            again = exported(ours, tmp_path)
            with Float64(), torch.no_grad():
                found, wanted = (model(input_ids=tokens).logits for model in (again, theirs.eval()))
            assert (found - wanted).abs().max() < 1e-9
            theirs.train()
    assert curve[-1] < curve[0] - 1.0


def exported(model, path):
    """The model as transformers loads it from a checkpoint that is exported."""
    alone = ParallelGroups.alone()
    state = {f"model/{name}": param_shards(param, alone) for name, param in named_parameters([model])}
    state |= {f"model/{name}": ShardedTensorRef.whole(buffer) for name, buffer in named_buffers([model])}
    saved = Checkpointer(path / "ours", groups=alone, **described(model.config)).save(5, state, {})
    found = export_weights(saved, model.config, path / "again")
    with Float64():
        made = transformers.AutoModelForCausalLM.from_pretrained(found, dtype=torch.float64)
    if hasattr(made.config, "num_experts_per_tok"):
        made.set_experts_implementation("eager")
    return made.eval()


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_converted_coefficient_gives_the_same_balancing_loss(name, tmp_path, monkeypatch):
    """Exactly so in one layer; in several, where they have equal shares."""
    theirs, ours = both(name, tmp_path / "model", monkeypatch, num_hidden_layers=1, router_aux_loss_coef=0.7)
    tokens, targets = batch_of(ours.config)
    with Float64():
        expected = 0.7 * theirs(input_ids=tokens, output_router_logits=True).aux_loss
    found = ours.loss(tokens, targets).aux / tokens.numel()
    assert found.item() == pytest.approx(expected.item(), rel=1e-9) and found > 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe, some dense"])
def test_the_first_loss_of_a_run_is_that_of_transformers(name, tmp_path, monkeypatch):
    """From the import to metrics.jsonl by the commands of the page, on the bytes of a text."""
    family, values = without_dropout(name)
    monkeypatch.setitem(MODELS, name, (family, values | {"vocab_size": 257}))
    theirs = save(name, tmp_path / "model").train()
    assert main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "ours")]) == 0
    recipe = f"--recipe {tmp_path}/ours/recipe.toml --steps 3 --train.eval-interval 0 --train.log-interval 1"
    data = f"--data.seq-len 32 --data.seed 3 --name first --train.run-dir {tmp_path}"
    command = [sys.executable, "-m", "fastmp", "train", *recipe.split(), *data.split()]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
    records = read_metrics(tmp_path / "first" / "metrics.jsonl")
    losses = [record["loss"] for record in records if record["kind"] == "train"]

    config = DataConfig(seq_len=32, seed=3)
    batch = TokenDataset.from_config(config, cache_dir=tmp_path / "data").batch(0, 0, 1, 0, 1)
    with torch.no_grad():
        expected = theirs(input_ids=batch["tokens"], labels=batch["tokens"], shift_labels=batch["targets"])
    assert losses[0] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert len(losses) == 3


SCALED = {"rope_type": "linear", "factor": 4.0}
ABSENT = {  # beside those of MODELS, values that decide what the absence of others means
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"sliding_window": 9, "use_sliding_window": True, "num_hidden_layers": 30},
    "qwen3": {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},
    "mixtral": {"rope_parameters": dict(SCALED)},  # transformers adds to a table that it is given
    "qwen3_moe": {"sliding_window": 9, "use_sliding_window": True},
    "dots1": {"rope_parameters": SCALED | {"rope_theta": 5e5}},
    "glm4_moe": {"rope_parameters": dict(SCALED), "head_dim": 8, "num_nextn_predict_layers": 0},
}


def meant(content):
    """Our configuration, or the reason why there is none."""
    try:
        config = from_transformers(content)[1]
    except ValueError as error:
        return str(error)
    return replace(config, num_kv_heads=config.kv_heads, head_size=config.head_dim)


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_absent_has_the_value_that_transformers_gives_it(name):
    family, _ = MODELS[name]
    kind = getattr(transformers, f"{family}Config")
    heads = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 6}
    values = SIZES | heads | MODELS[name][1] | heads | {"hidden_size": 64} | ABSENT[name]
    leave_out_each(kind, values)


def test_what_is_absent_of_a_bert_has_the_value_that_transformers_gives_it():
    leave_out_each(transformers.BertConfig, ENCODERS["bert"][1] | {"num_attention_heads": 16})


def leave_out_each(kind, values):
    for written in (kind(**values).to_dict(), {"model_type": kind.model_type, **values}):
        for key in (*written, "nothing"):
            if key == "num_nextn_predict_layers":
                continue  # transformers 5.24 counts one module then, of which a file may have no weights
            content = {each: value for each, value in written.items() if each != key}
            ours = meant(content)
            if not isinstance(ours, str):  # what they say of it, with nothing absent
                assert ours == meant(kind.from_dict(dict(content)).to_dict()), key


def test_scaling_that_was_added_to_a_file_of_transformers_5_counts():
    """As pages of models tell their users to do for longer texts."""
    content = transformers.LlamaConfig(**SIZES).to_dict() | {"rope_scaling": SCALED | {"factor": 2.0}}
    assert meant(content) == meant(transformers.LlamaConfig.from_dict(dict(content)).to_dict())
    assert meant(content).rope_scaling.factor == 2.0
