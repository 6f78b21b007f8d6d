"""A sharded model of transformers compiled, copied, saved, beside data-parallel ranks, and in other hands."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from hf_models import Float64, batch_of, model_of, step, tp_model, whole_gradients
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastmp
from fastmp.hf.tp_plan import clip_grad_norm_, whole_state_dict
from fastmp.ops import linear_log_probs
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_log_probs
from fastmp.tensor_parallel.sharded_state import sharded_state_dict
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)

pytestmark = pytest.mark.full
MOST = ["llama", "qwen3_moe"]


@pytest.mark.parametrize("family", [*MOST, "deepseek_v3"])
def test_compiled_and_recomputed_and_copied(family):
    def run(rank, world_size):
        batch, model = batch_of(family), tp_model(family, use_cache=False)
        step(model, **batch)
        wanted = whole_gradients(model, dist.group.WORLD)
        twin = copy.deepcopy(model)
        compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
        model.gradient_checkpointing_enable()
        for other in (twin, compiled, model):
            other.zero_grad()
            other(**batch).loss.backward()
            grads = whole_gradients(getattr(other, "_orig_mod", other), dist.group.WORLD)
            for name, grad in wanted.items():
                torch.testing.assert_close(grads[name], grad)
        with pytest.raises(TypeError, match="sharded over ranks and cannot be pickled"):
            torch.save(model, "/dev/null")
        with pytest.raises(ValueError, match=r"resize_token_embeddings: .* is sharded over ranks; call"):
            model.resize_token_embeddings(140)

    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(
        torch.ones(2)
    )  # imported before ranks are forked
    run_ranks(run, 2, timeout=200)


def replicated(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group())


def sharded(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("prepare", [replicated, sharded], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("family", MOST)
def test_beside_data_parallel_ranks(family, prepare):
    """Two ranks divide the model, and two such pairs the batch; gradients of two passes are added up."""
    batch, options = batch_of(family, 4), {"output_router_logits": False} if family == "qwen3_moe" else {}

    def trained(model, shares, clip):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                with Float64():
                    model(**shares).loss.backward()
            norms.append(clip(model, 0.5).item())
            optimizer.step()
        return norms

    whole = model_of(family, torch.float64, **options)
    wanted = trained(
        whole, batch, lambda model, norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    )

    def run(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = tp_model(family, group=mesh["tensor"].get_group(), **options)
        shares = {name: x[mesh["data"].get_local_rank() :: 2] for name, x in batch.items()}
        prepared = prepare(model, mesh["data"])
        assert trained(prepared, shares, clip_grad_norm_) == pytest.approx(wanted, rel=1e-9)
        state = whole_state_dict(prepared)
        assert list(state) == (list(whole.state_dict()) if mesh["tensor"].get_local_rank() == 0 else [])
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=0, atol=1e-9)

    run_ranks(run, 4, timeout=200)


@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_oss"])
def test_checkpoints_of_torch_hold_all_parts(family, tmp_path):
    def run(rank, world_size):
        model = tp_model(family, vocab_size=129)
        with pytest.raises(CheckpointException, match="give it sharded_state_dict"):
            dist.checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "none")
        dist.checkpoint.save(sharded_state_dict(model), checkpoint_id=tmp_path / "parts")
        weights = copy.deepcopy(list(model.parameters()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dist.checkpoint.load(sharded_state_dict(model), checkpoint_id=tmp_path / "parts")
        assert all(map(torch.equal, model.parameters(), weights))

    run_ranks(run, 2)


def test_ranks_that_are_taken_for_replicas_are_noticed():
    """DDP over the ranks that divide a model gives all of them the first one's part."""

    def run(rank, world_size):
        model = DistributedDataParallel(tp_model("llama"))
        if rank == 1:
            with pytest.raises(ValueError, match="shard 1 of the model is overwritten by shard 0, as by DDP"):
                model.module(**batch_of("llama"))

    run_ranks(run, 2)


def test_log_probabilities_of_a_divided_model():
    """As docs/reinforcement-learning.md has them of a whole one."""
    ids, whole = batch_of("qwen3")["input_ids"], model_of("qwen3", torch.float64, vocab_size=129)
    with Float64():
        expected = linear_log_probs(whole.model(ids).last_hidden_state, whole.lm_head.weight, ids)
        expected.square().sum().backward()

    def run(rank, world_size):
        model, group = tp_model("qwen3", vocab_size=129), dist.group.WORLD
        with Float64():
            hidden = model.model(ids).last_hidden_state
            found = vocab_parallel_linear_log_probs(
                hidden, model.lm_head.weight, ids, group=group, vocab_size=129
            )
            found.square().sum().backward()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        for name, grad in whole_gradients(model, group).items():
            torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=1e-9, atol=1e-9)

    run_ranks(run, 2)


def test_adapters_of_peft_are_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def run(rank, world_size):
        config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
        with pytest.raises(
            ValueError, match="GPT2LMHeadModel is sharded over ranks; PEFT adapters are not supported"
        ):
            peft.get_peft_model(tp_model("gpt2"), config)
        with pytest.raises(
            ValueError, match="GPT2LMHeadModel has a PEFT adapter, which is not supported with a group"
        ):
            model = peft.get_peft_model(model_of("gpt2"), config).get_base_model()
            fastmp.accelerate(model, group=dist.group.WORLD)

    run_ranks(run, 2)
