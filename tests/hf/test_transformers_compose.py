"""An accelerated model of transformers inside DDP, FSDP2, transformers' Trainer, Accelerate and PEFT.

Each test trains transformers' own model in the same way and asks for the same losses, weights or gradients.
"""

from __future__ import annotations

import pytest
import torch
from hf_models import VOCAB, Float64, are_lazy, assert_same, batch_of, model_of, step
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastmp
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)

pytestmark = pytest.mark.full
BOTH = ["llama", "qwen3_moe"]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


def shares(batch, rank, world_size):
    return {name: tensor[rank::world_size].contiguous() for name, tensor in batch.items()}


def on_ranks(family, prepare, accelerated):
    """Losses of two ranks, and the gradients that the first one has."""

    def run(rank, world_size):
        model = model_of(family, use_cache=False)
        if accelerated:
            fastmp.accelerate(model)
        model = prepare(model)
        output = model(**shares(batch_of(family, 4), rank, world_size))
        output.loss.backward()
        assert are_lazy(output.logits) == accelerated
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return output.loss.item(), grads if rank == 0 else None

    (first, grads), (second, _) = run_ranks(run, 2, timeout=200)
    return (first + second) / 2, grads


def replicated(model):
    return DistributedDataParallel(model)


def sharded(policy, head_alone=False):
    def prepare(model):
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        if head_alone:  # its weight is gathered in its own call
            fully_shard(model.lm_head, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    return prepare


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize(
    ("prepare", "tolerance"),
    [
        (replicated, 1e-5),
        (sharded(MixedPrecisionPolicy(), head_alone=True), 1e-5),
        (sharded(BF16), 3e-2),
    ],
    ids=["ddp", "fsdp2", "fsdp2-bf16"],
)
def test_ranks_get_the_gradients_that_they_get_of_transformers(family, prepare, tolerance):
    loss, grads = on_ranks(family, prepare, accelerated=True)
    wanted, wanted_grads = on_ranks(family, prepare, accelerated=False)
    assert abs(loss - wanted) <= tolerance * wanted
    assert grads.keys() == wanted_grads.keys()
    largest = max(grad.abs().max() for grad in wanted_grads.values())
    for name, grad in wanted_grads.items():
        assert (grads[name] - grad).abs().max() <= tolerance * largest, name


def test_a_sharded_model_is_refused():
    def run(rank, world_size):
        model = sharded(MixedPrecisionPolicy())(model_of("llama"))
        with pytest.raises(ValueError, match="is sharded already; accelerate it before fully_shard"):
            fastmp.accelerate(model)
        model = model_of("llama")
        fastmp.accelerate(model)
        sharded(MixedPrecisionPolicy())(model)
        with pytest.raises(ValueError, match=r"restore: the class FSDP.* was derived from an accel"):
            fastmp.restore(model)

    run_ranks(run, 2, timeout=200)


class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(3, VOCAB, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def flat(arrays):
    return [array for each in arrays for array in flat(each)] if isinstance(arrays, tuple) else [arrays]


@pytest.mark.parametrize("family", BOTH)
def test_the_trainer_of_transformers_trains_the_same(family, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs Accelerate, which is not installed")

    def trained(accelerated):
        model = model_of(family)
        if accelerated:
            fastmp.accelerate(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,  # the Trainer then gives num_items_in_batch
            gradient_checkpointing=True,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Documents(), eval_dataset=Documents())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, trainer.evaluate()["eval_loss"], trainer.predict(Documents()).predictions

    losses, evaluated, predictions = trained(accelerated=True)
    wanted_losses, wanted_evaluated, wanted_predictions = trained(accelerated=False)
    assert losses == pytest.approx(wanted_losses, rel=1e-3) and len(losses) == 3
    assert evaluated == pytest.approx(wanted_evaluated, rel=1e-3)
    for found, wanted in zip(flat(predictions), flat(wanted_predictions), strict=True):
        assert found.shape == wanted.shape  # logits, and what else transformers returns in evaluation
        assert abs(found - wanted).max() < 1e-2


def test_accelerate_trains_the_same():
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

    def trained(accelerated):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one of a process
        helper = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = model_of("llama")
        if accelerated:
            fastmp.accelerate(model)
        model, optimizer = helper.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        losses = []
        for _ in range(3):
            output = model(**batch_of("llama"))
            helper.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.item())
        return losses

    assert trained(True) == pytest.approx(trained(False), rel=1e-2)


def with_lora(model, **options):
    """LoRA whose second factors are not zero, so that all of it has a gradient."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


@pytest.mark.parametrize("first", ["accelerate", "lora"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),  # of which logits are made
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
        (
            "mixtral",
            {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        ),
    ],
    ids=["dense", "conv1d", "head", "experts", "experts-alone"],
)
def test_lora_gets_the_same_gradients(family, options, first):
    expected = step(with_lora(model_of(family), **options), **batch_of(family))
    assert all("lora" in name for name in expected[1]) and expected[1]
    model = model_of(family)
    if first == "accelerate":
        fastmp.accelerate(model)
        model = with_lora(model, **options)
    else:
        model = with_lora(model, **options)
        fastmp.accelerate(model)
    found = step(model, **batch_of(family))
    assert_same(found, expected, 1e-5)
    assert are_lazy(found[0].logits) == ("lm_head" not in options["target_modules"])
    fastmp.restore(model)
    assert_same(step(model, **batch_of(family)), expected, 1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "qwen3_moe", "deepseek_v3"])
def test_gradients_of_samples_by_vmap_are_those_of_one_at_a_time(family):
    """torch.func.vmap of torch.func.grad, with the labels that do not count in a sample."""
    model, batch = model_of(family, torch.float64, use_cache=False), batch_of(family, 3)
    batch["labels"][1, 5:] = -100
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights, ids, labels):
        given = {"input_ids": ids[None], "labels": labels[None]}
        return torch.func.functional_call(model, weights, (), given).loss

    gradients = torch.func.grad(loss)
    with Float64():
        wanted = [gradients(weights, *sample) for sample in zip(batch["input_ids"], batch["labels"])]
        fastmp.accelerate(model)
        found = torch.func.vmap(gradients, (None, 0, 0))(weights, batch["input_ids"], batch["labels"])
    for name, grads in found.items():
        torch.testing.assert_close(grads, torch.stack([each[name] for each in wanted]), rtol=0, atol=1e-9)
