"""`fastmp.accelerate(model, mesh=...)`: experts over ep, FSDP2, and other tokens on every rank.

The reference is one process that accumulates the gradients of the batches of all ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import deep_ep_stand_in
import pytest
import torch
from hf_models import VOCAB, Float64, model_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fastmp
from fastmp.hf import mesh_saving
from fastmp.hf.expert_parallel import expert_parameters, reserve
from fastmp.hf.mesh import dense_mesh
from fastmp.hf.mesh_loading import from_pretrained
from fastmp.hf.mesh_saving import trainable_state_dict
from fastmp.hf.tp_plan import clip_grad_norm_, whole_state_dict
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)

pytestmark = pytest.mark.full
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 1, 2), (2, 2, 1)]
SHOWN = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]
NAMES = ("dp_replicate", "dp_shard", "ep")
QUERY = "model.layers.1.self_attn.q_proj.weight"


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def batches_of(ranks):
    """A batch for each rank: other lengths, padding, and labels that do not count."""
    batches = []
    for rank in range(ranks):
        rows, length = 1 + rank % 2, 5 + 3 * rank
        ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rank))
        mask = torch.ones_like(ids)
        mask[-1, length - rank :] = 0
        labels = ids.where(mask.bool(), -100)
        labels[:, : rank + 1] = -100
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def count(batches):
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model, batches, total, scale, clip, steps=5):
    """Losses, gradients of the first step, norms, and weights after five steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    losses, norms, first = [], [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == len(batches) - 1)
            with Float64():
                loss = model(**batch, num_items_in_batch=total).loss
            (loss * scale).backward()
            losses.append(loss.item())
        first = first or {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norms.append(clip(model, 0.5).item())
        optimizer.step()
    return losses, norms, first, {name: full(p) for name, p in model.named_parameters()}


def clip_whole(model, norm):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    largest = max(tensor.abs().max() for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert (found[name] - tensor).abs().max() <= 1e-9 * largest, name


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((family, shape) for family in SHOWN for shape in MESHES),
        *((family, (2, 2)) for family in ("deepseek_v2", "dots1", "glm4_moe")),
    ],
    ids=str,
)
def test_five_steps_are_those_of_one_process(family, shape):
    ranks = torch.Size(shape).numel()
    batches = batches_of(ranks)
    total = count(batches)
    reference = model_of(family, torch.float64)
    losses, norms, grads, weights = train(reference, batches, total, 1.0, clip_whole)

    def run(rank, world_size):
        model = model_of(family, torch.float64)
        fastmp.accelerate(model, mesh=mesh_of(shape))
        found = train(model, [batches[rank]], total, float(world_size), clip_grad_norm_)
        assert found[0] == pytest.approx(losses[rank::world_size], rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)
        assert_close(found[2], grads)
        assert_close(found[3], weights)

    run_ranks(run, ranks, timeout=200)


@pytest.mark.parametrize("family", [*SHOWN, "tied"])
def test_the_first_rank_saves_a_whole_state_dict_alone(family, tmp_path, monkeypatch):
    """The same tensors as all ranks write, in files that transformers reads."""
    monkeypatch.setattr(mesh_saving, "_FILE_BYTES", 20_000)
    tied = family == "tied"
    family, options = ("qwen3_moe", {"tie_word_embeddings": True}) if tied else (family, {})
    wanted = model_of(family, **options).state_dict()
    given = {name: tensor for name, tensor in wanted.items() if not (tied and "embed_tokens" in name)}

    def run(rank, world_size):
        model = model_of(family, **options)
        fastmp.accelerate(model, mesh=mesh_of((1, 2)))
        model.save_pretrained(tmp_path / "together")
        state = whole_state_dict(model)
        if rank == 0:
            model.save_pretrained(tmp_path / "alone", state_dict=state)
            bf16 = {name: tensor.bfloat16() for name, tensor in state.items()}
            model.save_pretrained(tmp_path / "bf16", state_dict=bf16)
        model.save_pretrained(tmp_path / "said", is_main_process=rank == 0, state_dict=state)
        model.save_pretrained(tmp_path / f"each-{rank}", state_dict=given)  # all ranks have it
        for wrong, said in (
            (model.state_dict(), "a shard, expected the full tensor of shape"),
            ({"module.x": torch.ones(2)}, r"has module\.x, of shape \(2,\), expected a parameter"),
            ({"model.norm.weight": torch.ones(2)}, r"model.norm.weight, of shape \(2,\), expected the full"),
        ):
            with pytest.raises(ValueError, match=said):
                model.save_pretrained(tmp_path / "none", state_dict=wrong)

    run_ranks(run, 2, timeout=60)
    assert not (tmp_path / "none").exists() and not (tmp_path / "each-1").exists()
    found = {path.name: {} for path in tmp_path.iterdir()}
    for path in (path for each in found for path in (tmp_path / each).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found[path.parent.name] |= {name: (path.name, file.get_tensor(name)) for name in file.keys()}
    together = found["together"]
    for each, tensors in found.items():
        index = json.loads((tmp_path / each / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for name, (file, _) in tensors.items()}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in tensors.values())
        assert len(set(index["weight_map"].values())) > 2 and tensors.keys() == together.keys()
        for name, (_, tensor) in tensors.items():
            assert torch.equal(tensor, together[name][1].to(tensor.dtype)), name
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each).state_dict()
        assert loaded.keys() == wanted.keys()
        if each != "bf16":
            assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("family", SHOWN)
def test_saved_on_one_mesh_and_loaded_on_another(family, tmp_path):
    """transformers' files -> mesh (1, 2) -> files -> transformers, and mesh (2, 2), (2, 1, 2)."""
    original = model_of(family)
    original.save_pretrained(tmp_path / "0")
    wanted = original.state_dict()

    def copied(shape, source, target):
        def run(rank, world_size):
            model = from_pretrained(tmp_path / source, mesh=mesh_of(shape))
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(full(tensor), wanted[name], rtol=0, atol=0)
            model.save_pretrained(tmp_path / target)

        run_ranks(run, torch.Size(shape).numel(), timeout=200)

    copied((1, 2), "0", "1")
    copied((2, 2), "1", "2")
    copied((2, 1, 2), "2", "3")
    for number in "123":
        loaded, report = type(original).from_pretrained(tmp_path / number, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for name, tensor in loaded.state_dict().items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
    assert len(list((tmp_path / "2").glob("model-*.safetensors"))) == 4  # every rank has written


def by_user_before(model, mesh):
    ignored, dense = set(expert_parameters(model)), dense_mesh(mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=dense, ignored_params=ignored)
    fully_shard(model, mesh=dense, ignored_params=ignored)
    fastmp.accelerate(model, mesh=mesh)


def by_user_after(model, mesh):
    fastmp.accelerate(model, mesh=mesh, shard_dense=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=dense_mesh(mesh))
    fully_shard(model, mesh=dense_mesh(mesh))


def by_symmetric_memory(model, mesh):
    fastmp.accelerate(model, mesh=mesh, dispatcher="symmetric")
    reserve(model, 64)


def by_deepep(model, mesh):
    deep_ep_stand_in.install()
    fastmp.accelerate(model, mesh=mesh, dispatcher="deepep")


def compiled(model, mesh):
    fastmp.accelerate(model, mesh=mesh)
    for layer in model.model.layers:
        layer.self_attn.compile(backend="aot_eager")
        layer.input_layernorm.compile(backend="aot_eager")


@pytest.mark.parametrize("prepare", [by_user_before, by_user_after, by_symmetric_memory, by_deepep, compiled])
def test_prepared_in_other_ways(prepare):
    """Two passes before each step, the first of them without communication of gradients."""
    batches = batches_of(4)
    total = 2 * count(batches)
    wanted = train(model_of("qwen3_moe", torch.float64), batches * 2, total, 1.0, clip_whole, steps=2)

    def run(rank, world_size):
        model = model_of("qwen3_moe", torch.float64, use_cache=False)
        prepare(model, mesh_of((2, 2)))
        found = train(model, [batches[rank]] * 2, total, float(world_size), clip_grad_norm_, steps=2)
        assert found[1] == pytest.approx(wanted[1], rel=1e-9)
        assert_close(found[2], wanted[2])
        assert_close(found[3], wanted[3])

    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.ones(2))  # imported before the fork
    run_ranks(run, 4, timeout=200)


def test_activation_checkpointing_changes_nothing():
    def run(rank, world_size):
        model, batch = model_of("qwen3_moe", use_cache=False), batches_of(4)[rank]
        fastmp.accelerate(model, mesh=mesh_of((2, 2)))
        model(**batch).loss.backward()
        wanted = {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        model.gradient_checkpointing_enable()
        model(**batch).loss.backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad.to_local(), wanted[name]), name

    run_ranks(run, 4, timeout=200)


def test_bfloat16_parameters_and_float32_gradients():
    """Errors against float64 are at most 1.1 times those of FSDP2 without expert parallelism."""
    batches = batches_of(4)
    total = count(batches)
    wanted = train(model_of("qwen3_moe", torch.float64), batches, total, 1.0, clip_whole, steps=1)[2]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def error(shape):
        def run(rank, world_size):
            model = model_of("qwen3_moe")
            fastmp.accelerate(model, mesh=mesh_of(shape), fsdp={"mp_policy": policy})
            loss = model(**batches[rank], num_items_in_batch=total).loss
            (loss * world_size).backward()
            assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
            grads = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
            return sum(float((grads[name] - wanted[name]).square().sum()) for name in wanted) ** 0.5

        return run_ranks(run, 4, timeout=200)[0]

    assert error((2, 2)) <= 1.1 * error((4, 1))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
def test_routers_that_stay_float32(shape, tmp_path):
    """transformers loads the routers of DeepSeek-V3 in float32, whatever the dtype of the model."""
    model_of("deepseek_v3").save_pretrained(tmp_path)

    def loaded():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()

    batches, reference = batches_of(2), loaded()
    for batch in batches:
        (reference(**batch).loss / 2).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}

    def run(rank, world_size):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for model in (loaded(), from_pretrained(tmp_path, mesh=mesh_of(shape), dtype=torch.bfloat16)):
            fastmp.accelerate(model, mesh=mesh_of(shape), fsdp={"mp_policy": policy})
            model.train()(**batches[rank]).loss.backward()
            grads = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
            router = "model.layers.1.mlp.gate.weight"
            assert grads[router].dtype == torch.float32 and grads["lm_head.weight"].dtype == torch.bfloat16
            for name, grad in grads.items():
                assert (grad - wanted[name]).norm() <= 0.05 * wanted[name].norm(), name
            clip_grad_norm_(model, 1e-3)
            squares = [full(p.grad).double().square().sum() for p in model.parameters()]
            assert sum(squares).sqrt().item() == pytest.approx(1e-3, rel=1e-2)

    run_ranks(run, 2, timeout=200)


def test_checkpoint_of_torch_loads_on_another_mesh(tmp_path):
    """Weights and moments saved on mesh (2, 2) are loaded on others, which continue the same."""
    batches = batches_of(4)
    total = count(batches)

    def step(model, optimizer, rank):
        optimizer.zero_grad()
        with Float64():
            (model(**batches[rank], num_items_in_batch=total).loss * 4).backward()
        optimizer.step()

    def run(rank, world_size, shape, load):
        model = model_of("qwen3_moe", torch.float64)
        fastmp.accelerate(model, mesh=mesh_of(shape))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if load:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        else:
            step(model, optimizer, rank)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        if load:
            dcp.load(state, checkpoint_id=tmp_path)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        else:
            dcp.save(state, checkpoint_id=tmp_path)
        step(model, optimizer, rank)
        return {name: full(parameter) for name, parameter in model.named_parameters()}

    wanted = run_ranks(run, 4, (2, 2), False, timeout=200)[0]
    for shape in [(1, 4), (4, 1), (2, 1, 2)]:
        assert_close(run_ranks(run, 4, shape, True, timeout=200)[0], wanted)


def test_a_rank_holds_its_share():
    """Numbers of a rank: experts / (dp_shard ep), and the rest / (dp_shard ep), up to FSDP2's rounding."""

    def run(rank, world_size, shape):
        model = model_of("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        rows = {name: parameter.numel() // len(parameter) for name, parameter in model.named_parameters()}
        fastmp.accelerate(model, mesh=mesh_of(shape))
        replicas = shape[0] if len(shape) == 3 else 1
        for name, parameter in model.named_parameters():
            share = whole[name] * replicas // world_size
            assert abs(parameter.to_local().numel() - share) <= rows[name] * ("experts" not in name)

    for shape in [(2, 2), (1, 4), (2, 1, 2)]:
        run_ranks(run, 4, shape, timeout=200)


def test_experts_without_tokens():
    """Every token chooses the experts of one ep rank; the gradients of the others are zeros."""

    def run(rank, world_size):
        model = model_of("qwen3_moe", torch.float64, output_router_logits=False)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                with torch.no_grad():
                    parameter.zero_()  # equal logits: two experts of one rank
        fastmp.accelerate(model, mesh=mesh_of((1, 2)))
        with Float64():
            model(**batches_of(2)[rank]).loss.backward()
        grad = full(model.model.layers[1].mlp.experts.down_proj.grad)
        live = [bool(expert.any()) for expert in grad]
        assert live in ([True, True, False, False], [False, False, True, True])

    run_ranks(run, 2, timeout=200)


@pytest.mark.parametrize(
    ("shape", "names", "family", "message"),
    [
        ((2,), ("ep",), "qwen3_moe", r'expected a mesh with mesh_dim_names \("dp_shard", "ep"\)'),
        ((1, 2), ("dp_shard", "ep"), "llama", "has no experts to shard over a mesh; call accelerate"),
        ((1, 2), ("dp_shard", "ep"), "odd", "the 3 experts of model.layers.1.mlp.experts are not divisible"),
        ((1, 2), ("dp_shard", "ep"), "sharded", "the experts of .* are sharded already; leave them out"),
        ((1, 2), ("dp_shard", "ep"), "part", "fully_shard has left out model.embed_tokens.weight; apply it"),
        ((1, 2), ("dp_shard", "ep"), "differs", "of rank 1 of the group differs from that of rank 0"),
        ((1, 2), ("dp_shard", "ep"), "fp8", "not supported with a group or mesh"),
        ((1, 2), ("dp_shard", "ep"), "wrapped", "got a Sequential; accelerate the model before"),
        ((1, 2), ("dp_shard", "ep"), "dispatcher", "dispatcher must be one of|expected one of"),
        ((1, 2), ("dp_shard", "ep"), "options", "fsdp has mesh; expected some of mp_policy"),
    ],
)
def test_what_cannot_be_sharded_changes_nothing(shape, names, family, message):
    def run(rank, world_size):
        kind = family if family == "llama" else "qwen3_moe"
        model = model_of(kind, **({"num_experts": 3} if family == "odd" else {}))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if family == "sharded":
            for layer in model.model.layers:
                fully_shard(layer)
        if family == "part":  # gradients of embedding and head would stay those of each rank
            for layer in model.model.layers:
                fully_shard(layer, ignored_params=set(expert_parameters(model)))
        if family == "differs" and rank == 1:
            with torch.no_grad():
                model.lm_head.weight.add_(1)
        wrong = {
            "fp8": {"precision": "fp8"},
            "dispatcher": {"dispatcher": "pigeon"},
            "options": {"fsdp": {"mesh": mesh}},
        }
        given = torch.nn.Sequential(model) if family == "wrapped" else model
        before = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=message):
            fastmp.accelerate(given, mesh=mesh, **wrong.get(family, {}))
        assert [type(module) for module in model.modules()] == before

    run_ranks(run, 2, timeout=200)


def test_second_call_and_restore():
    def run(rank, world_size):
        model, mesh = model_of("qwen3_moe"), mesh_of((1, 2))
        table = fastmp.accelerate(model, mesh=mesh)
        assert fastmp.accelerate(model, mesh=mesh) is table
        assert table.sharded["Qwen3MoeExperts"] == "experts over 2, FSDP2 over 1"
        with pytest.raises(ValueError, match="is accelerated without this mesh"):
            fastmp.accelerate(model, mesh=mesh_of((2, 1)))
        with pytest.raises(ValueError, match="was derived from an accelerated one"):
            fastmp.restore(model)

    run_ranks(run, 2, timeout=200)


@pytest.mark.parametrize("family", SHOWN)
def test_lora_on_attention_and_experts(family, tmp_path):
    """Adapters of PEFT, applied before the mesh, are those of one process; they are saved and loaded."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    batches = batches_of(4)
    total = count(batches)

    def adapted():
        torch.manual_seed(1)
        attention = ["o_proj", "q_a_proj", "q_proj"]
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(r=2, target_modules=attention, target_parameters=parameters)
        model = peft.get_peft_model(model_of(family, torch.float64), config).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        return model

    def trainable(weights):
        return {name: tensor for name, tensor in weights.items() if "lora" in name}

    losses, norms, grads, weights = train(adapted(), batches, total, 1.0, clip_whole, steps=3)

    def run(rank, world_size):
        model = adapted()
        fastmp.accelerate(model, mesh=mesh_of((2, 2)))
        found = train(model, [batches[rank]], total, float(world_size), clip_grad_norm_, steps=3)
        assert found[0] == pytest.approx(losses[rank::world_size], rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)
        assert_close(found[2], grads)
        assert_close(trainable(found[3]), trainable(weights))
        model.save_pretrained(tmp_path)
        state = trainable_state_dict(model)
        model.save_pretrained(tmp_path / f"again-{rank}", state_dict=state)
        assert (tmp_path / f"again-{rank}").exists() == (rank == 0)
        if rank == 0:
            files = [path / "adapter_model.safetensors" for path in (tmp_path, tmp_path / "again-0")]
            assert files[0].read_bytes() == files[1].read_bytes()

    run_ranks(run, 4, timeout=200)
    loaded = peft.PeftModel.from_pretrained(model_of(family, torch.float64), tmp_path).double()
    assert_close(trainable({name: full(p) for name, p in loaded.named_parameters()}), trainable(weights))


def test_host_memory_of_loading_is_the_shards_and_a_tensor(tmp_path):
    """A rank of two reads 103 MB of 206 MB and needs little more; no rank ever holds the model."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "vocab_size": 1000}
    model_of("qwen3_moe", **sizes, num_hidden_layers=4, mlp_only_layers=[]).save_pretrained(tmp_path)

    def resident(field):
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{field}:")[2].split()[0]) << 10

    def run(rank, world_size):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        model = from_pretrained(tmp_path, mesh=mesh_of((1, 2)))
        peak = resident("VmHWM") - before
        shards = sum(tensor.to_local().nbytes for tensor in model.parameters())
        return shards, peak

    for shards, peak in run_ranks(run, 2, timeout=200):
        assert 100 << 20 > shards > 95 << 20
        assert shards < peak < shards + (32 << 20)


def test_packed_documents():
    """Documents of a flattened batch, kept apart by transformers' variable-length attention."""

    def packed(rank):
        ids = torch.randint(3, VOCAB, (1, 12 + rank), generator=torch.Generator().manual_seed(rank))
        ends = torch.tensor([0, 5, 7 + rank, 12 + rank], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(n)) for n in ends.diff()])[None]
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
        return {"input_ids": ids, "labels": ids, "position_ids": positions, **lengths}

    def prepared():
        model = model_of("qwen3_moe", torch.float64, use_cache=False, output_router_logits=False)
        fastmp.accelerate(model) if mesh is None else fastmp.accelerate(model, mesh=mesh)
        model.set_attn_implementation("fastmp_varlen")
        return model

    mesh, batches = None, [packed(rank) for rank in range(4)]
    total = count(batches)
    wanted = train(prepared(), batches, total, 1.0, clip_whole, steps=2)

    def run(rank, world_size):
        nonlocal mesh
        mesh = mesh_of((2, 2))
        found = train(prepared(), [batches[rank]], total, 4.0, clip_grad_norm_, steps=2)
        assert_close(found[2], wanted[2])
        assert_close(found[3], wanted[3])

    run_ranks(run, 4, timeout=200)


def test_files_that_do_not_fit_are_errors_on_all_ranks(tmp_path):
    model = model_of("qwen3_moe")
    for name, change in {
        "missing": lambda state: state.pop("model.norm.weight"),
        "unexpected": lambda state: state.update(other=torch.zeros(2)),
        "shape": lambda state: state.update({"model.norm.weight": torch.ones(3)}),
        "fp8 shape": lambda state: state.update(
            {QUERY: state[QUERY][:1].to(torch.float8_e4m3fn), f"{QUERY}_scale_inv": torch.ones(1, 1)}
        ),
    }.items():
        model.save_pretrained(tmp_path / name)
        state = load_file(tmp_path / name / "model.safetensors")
        change(state)
        save_file(state, tmp_path / name / "model.safetensors")
    config = json.loads((tmp_path / "fp8 shape" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8 shape" / "config.json").write_text(json.dumps(config))
    (tmp_path / "taken").write_text("no directory")
    (tmp_path / "config" / "config.json").mkdir(parents=True)

    def run(rank, world_size):
        mesh = mesh_of((1, 2))
        for name, message in {
            "missing": "model.norm.weight is missing",
            "unexpected": "model.safetensors: unexpected 'other'",
            "fp8 shape": rf"model.safetensors: {QUERY} has shape \[1, 32\], config.json says \[32, 32\]",
            "shape": r"model.norm.weight has shape \[3\], config.json says \[32\]",
            "nowhere": "not a local directory",
        }.items():
            with pytest.raises(ValueError, match=message):
                from_pretrained(tmp_path / name, mesh=mesh)
        sharded = model_of("qwen3_moe")
        fastmp.accelerate(sharded, mesh=mesh)
        with pytest.raises(ValueError, match=r"save_pretrained: .* cannot write"):
            sharded.save_pretrained(tmp_path / "taken")
        with pytest.raises(ValueError, match=r"save_pretrained: rank 0 of the group: IsADirectoryError"):
            sharded.save_pretrained(tmp_path / "config")

    run_ranks(run, 2, timeout=200)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_lora_of_a_model_that_no_rank_ever_holds(family, tmp_path):
    """Adapters get the numbers that PEFT gives them, and the step that they have with `accelerate`."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model_of(family).save_pretrained(tmp_path / "model")
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    batches = batches_of(4)
    total = count(batches)

    def step(model, rank):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        (model(**batches[rank], num_items_in_batch=total).loss * 4).backward()
        return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    def run(rank, world_size):
        mesh = mesh_of((2, 2))
        loaded = type(model_of(family)).from_pretrained(tmp_path / "model")
        torch.manual_seed(7)
        whole = peft.get_peft_model(loaded, config)
        fastmp.accelerate(whole, mesh=mesh)
        torch.manual_seed(7)
        streamed = from_pretrained(tmp_path / "model", mesh=mesh, peft_config=config)
        for name, parameter in whole.named_parameters():
            other = streamed.get_parameter(name)
            if "lora_A" in name:  # of the same distribution: uniform between the same bounds
                largest = full(parameter).abs().max().item()
                assert full(other).abs().max().item() == pytest.approx(largest, rel=0.3)
                other.data.to_local().copy_(parameter.data.to_local())
            torch.testing.assert_close(full(other), full(parameter), rtol=0, atol=0)
        assert_close(step(streamed.train(), rank), step(whole.train(), rank))
        with pytest.raises(ValueError, match="has adapters; save them with the PEFT model"):
            streamed.base_model.model.save_pretrained(tmp_path / "no")

    run_ranks(run, 4, timeout=200)
