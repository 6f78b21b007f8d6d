"""`fastmp.accelerate(model, mesh=...)`: experts over ep, FSDP2, and other tokens on every rank.

The reference is one process that accumulates the gradients of the batches of all ranks.
"""

from __future__ import annotations

import pytest
import torch
from hf_models import VOCAB, Float64, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fastmp
from fastmp.hf.mesh_loading import from_pretrained
from fastmp.hf.tp_plan import clip_grad_norm_
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)

pytestmark = pytest.mark.full
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 1, 2), (2, 2, 1)]
NAMES = ("dp_replicate", "dp_shard", "ep")


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
        for batch in batches:
            with Float64():
                loss = model(**batch, num_items_in_batch=total).loss
            (loss * scale).backward()
            losses.append(loss.item())
        first = first or {name: full(p.grad) for name, p in model.named_parameters()}
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


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
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


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
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
