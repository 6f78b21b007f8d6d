"""Models sharded over a mesh in transformers' Trainer, Accelerate and TRL."""

from __future__ import annotations

import os

import pytest
import torch
from hf_models import VOCAB, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fastmp
from fastmp.hf.mesh_loading import from_pretrained
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)
accelerate = pytest.importorskip("accelerate", reason="transformers' Trainer needs Accelerate")

pytestmark = pytest.mark.full


class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(3, VOCAB, (16,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 8] = -100
        return {"input_ids": ids, "labels": labels}


def trained(model, path, batch, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        **{"max_steps": 3, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 2},
        **{"learning_rate": 1e-2, "logging_steps": 1, "max_grad_norm": 0.5},
        **{"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True},
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Documents(), eval_dataset=Documents())
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return trainer, [(entry["loss"], entry["grad_norm"]) for entry in logged]


def as_launched(rank, world_size):
    """Set what torchrun sets, which Accelerate reads, and forget what it read before the fork."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
def test_trainer(shape, tmp_path):
    """Two ranks with batches of two are one process with batches of four; the model is saved and loaded."""
    _, wanted = trained(model_of("qwen3_moe", output_router_logits=False), tmp_path / "one", 4)

    def run(rank, world_size):
        as_launched(rank, world_size)
        model = model_of("qwen3_moe", output_router_logits=False)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "ep"))
        fastmp.accelerate(model, mesh=mesh)
        trainer, logged = trained(model, tmp_path / "run", 2)
        assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
        trainer.save_model(str(tmp_path / "saved"))
        loaded = from_pretrained(tmp_path / "saved", mesh=mesh)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter.to_local(), model.get_parameter(name).to_local()), name
        return logged, trainer.evaluate()["eval_loss"]

    for logged, evaluated in run_ranks(run, 2, timeout=280):
        assert len(logged) == 3
        for (loss, norm), (wanted_loss, wanted_norm) in zip(logged, wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-4)
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
        assert 0 < evaluated < 10


def test_accelerate(tmp_path):
    """The model is the user's own; Accelerate prepares optimizer and data, and clips over both meshes."""

    def run(rank, world_size):
        as_launched(rank, world_size)
        helper = accelerate.Accelerator(cpu=True)
        model = model_of("qwen3_moe", output_router_logits=False)
        fastmp.accelerate(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep")))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        data = torch.utils.data.DataLoader(Documents(), batch_size=2)
        optimizer, data = helper.prepare(optimizer, data)
        losses = []
        for batch in data:
            loss = model(**batch).loss
            helper.backward(loss)
            norm = helper.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((helper.reduce(loss.detach(), "mean").item(), norm.item()))
        return losses

    found, other = run_ranks(run, 2, timeout=200)
    assert found == other and len(found) == 4
    model = model_of("qwen3_moe", output_router_logits=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number, (wanted, wanted_norm) in enumerate(found):
        loss = sum(
            model(**torch.utils.data.default_collate([Documents()[i] for i in (first, first + 1)])).loss / 2
            for first in (4 * number, 4 * number + 2)
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(wanted, rel=1e-4)
        assert norm.item() == pytest.approx(wanted_norm, rel=1e-4)


def tokenizer_of(path):
    """A tokenizer of single letters, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = ["<pad>", "<bos>", "<eos>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({each: i for i, each in enumerate(letters)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_trl_trains_twenty_steps(kind, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    texts = [f"{a} plus {b} is {a + b}." for a in range(10) for b in range(10)]
    common = {
        **{"output_dir": str(tmp_path), "max_steps": 20, "per_device_train_batch_size": 4},
        **{"learning_rate": 5e-3, "logging_steps": 1, "report_to": [], "save_strategy": "no"},
        **{"use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False},
    }

    def made(model):
        if kind == "sft":
            data = datasets.Dataset.from_dict({"text": texts})
            config = trl.SFTConfig(**common, max_length=32)
            return trl.SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer_of(tmp_path))
        data = datasets.Dataset.from_dict({"prompt": [text[:9] for text in texts]})
        config = trl.GRPOConfig(
            **common, num_generations=4, max_completion_length=8, beta=0.0, generation_batch_size=8
        )
        return trl.GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [float(each.count("1")) for each in completions],
            args=config,
            train_dataset=data,
            processing_class=tokenizer_of(tmp_path),
        )

    def run(rank, world_size):
        as_launched(rank, world_size)
        model = model_of("qwen3_moe", output_router_logits=False)
        fastmp.accelerate(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep")))
        trainer = made(model)
        trainer.train()
        key = "loss" if kind == "sft" else "reward"
        return [entry[key] for entry in trainer.state.log_history if key in entry]

    found, other = run_ranks(run, 2, timeout=280)
    assert found == other and len(found) == 20
    if kind == "sft":
        assert found[-1] < 0.7 * found[0]
