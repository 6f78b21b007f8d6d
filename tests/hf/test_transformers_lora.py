"""PEFT's LoRA on attention and on experts of accelerated models, against PEFT's own merged weights."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hf_models import Float64, assert_same, batch_of, model_of, step
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fastmp
from fastmp.config.precision import Fp8Recipe
from fastmp.hf import lora
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
if not hasattr(peft.tuners.lora.layer, "ParamWrapper"):
    pytest.skip(f"peft {peft.__version__} has no LoRA on parameters", allow_module_level=True)

pytestmark = pytest.mark.full
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = {"deepseek_v3": ["q_a_proj", "kv_b_proj", "o_proj"]}
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


def config_of(family, **options):
    modules = ATTENTION.get(family, ["q_proj", "v_proj", "o_proj"])
    return peft.LoraConfig(
        **{"r": 3, "lora_alpha": 7, "target_modules": modules, "target_parameters": EXPERTS, **options}
    )


def spread(model, seed=1):
    """Give both factors numbers: B starts with zeros, where A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def adapted(family, *, accelerated, first="accelerate", dtype=torch.float64, config=None, **options):
    model = model_of(family, dtype, **options)
    config = config or config_of(family)
    if accelerated and first == "accelerate":
        fastmp.accelerate(model)
    model = spread(peft.get_peft_model(model, config, autocast_adapter_dtype=False))
    if accelerated and first == "lora":
        fastmp.accelerate(model)
    return model


class Largest(TorchDispatchMode):
    """Records the sizes of what is allocated of experts' rank: (E, N, K)."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and not tensor._is_view():
                self.shapes.add(tuple(tensor.shape))
        return out


def losses_and_weights(model, batch, steps=5):
    """Losses of training steps, gradients of the first, and the adapters after the last."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses, grads = [], {}
    with Float64():
        for _ in range(steps):
            loss = model(**batch).loss
            loss.backward()
            grads = grads or {name: p.grad.clone() for name, p in trained.items()}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, grads, {name: p.detach().clone() for name, p in trained.items()}


@pytest.mark.parametrize("first", ["accelerate", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_merged_weights_do(family, first):
    """Losses, gradients of A and B, and the adapters after five steps of AdamW; no merged weight is made."""
    batch = batch_of(family)
    expected = losses_and_weights(adapted(family, accelerated=False), batch)
    model = adapted(family, accelerated=True, first=first)
    experts = next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "num_experts"))
    stored = {tuple(experts.gate_up_proj.shape), tuple(experts.down_proj.shape)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = losses_and_weights(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert {name.split("lora_")[1][0] for name in found[1] if "experts" in name} == {"A", "B"}
    assert all(grad.any() for grad in found[1].values())
    for accelerated in (True, False):
        with Largest() as largest:
            (model if accelerated else adapted(family, accelerated=False))(**batch).loss.backward()
        assert bool(stored & largest.shapes) != accelerated


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
def test_experts_over_a_mesh(family, shape, tmp_path):
    """Adapters that come before `accelerate(model, mesh=...)`: the gradients are those of one process."""
    ranks = torch.Size(shape).numel()
    batch = batch_of(family, ranks)
    model = adapted(family, accelerated=False)
    with Float64():
        for rank in range(ranks):  # one by one, as the balancing loss is no mean over samples
            own = {name: tensor[rank : rank + 1] for name, tensor in batch.items()}
            (model(**own).loss / ranks).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def run(rank, world_size):
        model = adapted(family, accelerated=False)
        fastmp.accelerate(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "ep")))
        own = {name: tensor[rank : rank + 1] for name, tensor in batch.items()}
        with warnings.catch_warnings(), Float64():
            warnings.filterwarnings("error", message="LoRA on")
            model(**own).loss.backward()
        found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
        state = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        )
        if rank == 0:
            model.save_pretrained(tmp_path / "ours", state_dict=state)
        plain = model_of(family, torch.float64)
        fastmp.accelerate(plain, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "ep")))
        with pytest.raises(ValueError, match=r"call get_peft_model before accelerate\(model, mesh=\.\.\.\)"):
            peft.get_peft_model(plain, config_of(family))

    run_ranks(run, ranks, timeout=200)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (tmp_path / name / "adapter_model.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("parameters", [EXPERTS[:1], EXPERTS[1:]], ids=str)
def test_one_parameter_alone(parameters):
    config = config_of("qwen3_moe", target_parameters=parameters, target_modules=[])
    results = [
        losses_and_weights(adapted("qwen3_moe", accelerated=a, config=config), batch_of("qwen3_moe"), 2)
        for a in (True, False)
    ]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_disk_are_those_of_peft(family, tmp_path):
    """Written with fastmp and read without it, and the other way round; merged too."""
    batch = batch_of(family)
    ours, theirs = (adapted(family, accelerated=a) for a in (True, False))
    with Float64():
        ours(**batch).loss.backward()  # after a step of ours nothing of it is left in the module
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("ours", "theirs")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    with Float64(), torch.no_grad():
        want = theirs(**batch).loss
        model = model_of(family, torch.float64)
        fastmp.accelerate(model)
        loaded = peft.PeftModel.from_pretrained(model, tmp_path / "theirs", autocast_adapter_dtype=False)
        torch.testing.assert_close(loaded(**batch).loss, want, rtol=1e-11, atol=0)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(**batch).loss, want, rtol=1e-11, atol=0)
        torch.testing.assert_close(
            merged.state_dict(), theirs.merge_and_unload().state_dict(), rtol=1e-14, atol=1e-14
        )


def test_adapters_are_switched():
    """Disabled, a second one, both at once, unmerged after a merge."""
    family, batch, losses = "mixtral", batch_of("mixtral"), []
    plain = model_of(family, torch.float64)
    with Float64(), torch.no_grad():
        without = plain(**batch).loss.item()
        for accelerated in (True, False):
            model = adapted(family, accelerated=accelerated)
            found = [model(**batch).loss.item()]
            with model.disable_adapter():
                assert model(**batch).loss.item() == pytest.approx(without, rel=1e-12)
            model.add_adapter("second", config_of(family, r=2, lora_alpha=1))
            spread(model, 2)
            model.set_adapter("second")
            found.append(model(**batch).loss.item())
            model.base_model.set_adapter(["default", "second"])
            found.append(model(**batch).loss.item())
            model.merge_adapter()
            found.append(model(**batch).loss.item())
            model.unmerge_adapter()
            found.append(model(**batch).loss.item())
            losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)
    assert len({f"{loss:.6f}" for loss in losses[0][:3]}) == 3
    assert losses[0][2] == pytest.approx(losses[0][3], rel=1e-11)


def test_under_fsdp2():
    """Layers that `fully_shard` shards after accelerate and PEFT."""
    batch = batch_of("mixtral")
    model = adapted("mixtral", accelerated=False)
    with Float64():
        for rank in range(2):
            (model(**{n: t[rank : rank + 1] for n, t in batch.items()}).loss / 2).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def run(rank, world_size):
        model = adapted("mixtral", accelerated=True)
        for module in (*model.get_base_model().model.layers, model):
            fully_shard(module)
        with warnings.catch_warnings(), Float64():
            warnings.filterwarnings("error", message="LoRA on")
            model(**{n: t[rank : rank + 1] for n, t in batch.items()}).loss.backward()
        found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)

    run_ranks(run, 2, timeout=200)


def test_under_autocast():
    """As the Trainer's bf16 does; errors of adapters against float32 at most 1.1 times those of PEFT.

    Errors are those of four models: in one of them a token may choose another expert.
    """
    batch, squares = batch_of("qwen3_moe", 8, 32), {True: 0.0, False: 0.0}
    for seed in range(4):
        made = [spread(adapted("qwen3_moe", accelerated=a, dtype=torch.float32), seed) for a in squares]
        truth = step(made[1], **batch)[1]
        for accelerated, model in zip(squares, made, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                grads = step(model, **batch)[1]
            errors = [(grads[name] - truth[name]).square().sum() for name in truth if "experts" in name]
            squares[accelerated] += sum(errors).item()
    assert 0 < squares[True] <= 1.1**2 * squares[False]


def test_compiles_as_one_graph():
    model = adapted("mixtral", accelerated=True, dtype=torch.float32, use_cache=False)
    want = step(model, **batch_of("mixtral"))
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(model, **batch_of("mixtral")), want, 1e-6)


def test_gradient_checkpointing_and_copies():
    made = adapted("qwen3_moe", accelerated=True, dtype=torch.float32, use_cache=False)
    batch = batch_of("qwen3_moe")
    want = step(copy.deepcopy(made), **batch)
    model = copy.deepcopy(made)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(model, **batch), want, 1e-6)


def test_adapters_in_float32_over_weights_in_bfloat16():
    """PEFT's default; errors against float64 at most 1.1 times those of merged weights."""
    family, batch = "qwen3_moe", batch_of("qwen3_moe", 8, 32)
    exact = adapted(family, accelerated=False, dtype=torch.bfloat16)
    truth = losses_and_weights(exact.double(), batch, 1)[1]
    errors = []
    for accelerated in (True, False):
        model = model_of(family, torch.bfloat16)
        if accelerated:
            fastmp.accelerate(model)
        model = peft.get_peft_model(model, config_of(family))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    assert parameter.dtype == torch.float32
                    parameter.copy_(dict(exact.named_parameters())[name])
        model(**batch).loss.backward()
        grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        assert grads.keys() == truth.keys()
        squares = sum(((grads[n] - truth[n]) ** 2).sum() for n in truth if "experts" in n)
        errors.append(squares.sqrt().item())
    assert 0 < errors[0] <= 1.1 * errors[1]


def test_what_the_op_does_not_compute_is_merged_with_a_warning():
    batch = batch_of("mixtral")
    want = losses_and_weights(adapted("mixtral", accelerated=False), batch, 1)
    model = adapted("mixtral", accelerated=True)
    for name, parameter in model.named_parameters():
        if "experts" in name and "lora" not in name:
            parameter.requires_grad_()
    message = r"LoRA on MixtralExperts\.gate_up_proj merges the weights in every forward: the weight is tr"
    with pytest.warns(UserWarning, match=message), Float64():
        loss = model(**batch).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if "lora" in n}
    torch.testing.assert_close(grads, want[1], rtol=1e-10, atol=1e-10)
    assert all(p.grad is not None for n, p in model.named_parameters() if "experts" in n)


def test_experts_in_fp8_are_merged():
    model = model_of("qwen3_moe", hidden_size=128, moe_intermediate_size=128, intermediate_size=128)
    fastmp.accelerate(model, precision=Fp8Recipe(128))
    config = config_of("qwen3_moe", target_modules=[])
    with pytest.warns(UserWarning, match="the experts multiply in FP8"):
        spread(peft.get_peft_model(model, config))(**batch_of("qwen3_moe")).loss.backward()


@pytest.mark.parametrize(("option", "value"), [("lora_dropout", 0.1), ("use_dora", True)])
def test_what_peft_has_not_stays_its_error(option, value):
    model = model_of("mixtral")
    fastmp.accelerate(model)
    with pytest.raises(ValueError, match=rf"ParamWrapper does not work with {option}"):
        peft.get_peft_model(model, config_of("mixtral", target_modules=[], **{option: value}))


def test_restored_models_and_others_are_not_touched():
    """PEFT's wrappers have our method in the whole process; it acts on accelerated experts alone."""
    fastmp.accelerate(model_of("mixtral"))
    merge = peft.tuners.lora.layer.ParamWrapper._activate_lora
    lora.register("another")
    assert peft.tuners.lora.layer.ParamWrapper._activate_lora is merge
    batch, model = batch_of("mixtral"), adapted("mixtral", accelerated=True)
    fastmp.restore(model)
    experts = next(m for m in model.modules() if type(m).__name__ == "MixtralExperts")
    with Largest() as largest:
        model(**batch).loss.backward()
    assert tuple(experts.gate_up_proj.shape) in largest.shapes
