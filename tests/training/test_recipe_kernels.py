"""The kernels of recipes, listed without a GPU; `fastmp warm`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import torch.distributed as dist
from marks import full

from fastmp.apps.cli import main
from fastmp.config import (
    BertConfig,
    DataConfig,
    GPTConfig,
    MaskedLMConfig,
    MoEConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.distributed.runtime import Runtime
from fastmp.nn.gpt import GPT
from fastmp.nn.placement import Placement
from fastmp.ops.precompile import recording
from fastmp.training import recipe_kernels
from fastmp.training.language import token_loss

MODEL = GPTConfig(
    vocab_size=257, num_layers=4, hidden_size=128, num_heads=4, max_seq_len=64, norm="rmsnorm",
    activation="swiglu", position="rope",
)  # fmt: skip
MOE = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=64, expert_bias=True)
ALWAYS = {"norm_kernel", "norm_backward_kernel", "rope_kernel", "adamw_kernel"}
EXPERTS = {"router_kernel", "grouped_mm_kernel", "grouped_wgrad_kernel", "scatter_kernel", "gather_kernel"}


def names(
    model: GPTConfig, world_size: int = 1, documents: bool = False, precision: str = "dtype", arch: int = 90,
    **layout: object,
) -> set[str]:  # fmt: skip
    data, train = DataConfig(seq_len=64, document_masking=documents), TrainConfig(precision=precision)
    recipe = replace(Recipe(), model=model, parallel=ParallelConfig(**layout), data=data, train=train)
    codes = recipe_kernels.codes_of_recipe(recipe, world_size, arch)
    assert not dist.is_initialized()
    assert len(codes) == len(set(codes))
    return {code.kernel for code in codes}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (2, {"cp": 2}),
        (4, {"tp": 2, "pp": 2, "vpp": 2}),
        (2, {"recompute": True}),
        (4, {"cp": 2, "pp": 2, "documents": True}),
    ],
    ids=str,
)
def test_dense_models(world_size, layout):
    found = names(MODEL, world_size, **layout)
    assert found >= ALWAYS | {"gated_activation_kernel", "gated_activation_backward_kernel"}
    assert not found & EXPERTS


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (4, {"tp": 2, "ep": 2, "etp": 1, "pp": 2}),
        (2, {"ep": 2}),
        (4, {"tp": 2, "ep": 2}),
        (2, {"tp": 2, "etp": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dispatcher", ["alltoall", *full(["allgather", "symmetric", "deepep"])])
def test_experts(world_size, layout, dispatcher):
    model = replace(MODEL, moe=replace(MOE, dispatcher=dispatcher))
    sorted_once = dispatcher == "symmetric" and layout.get("ep", 1) > 1  # rows are sorted where they are sent
    own = EXPERTS - {"scatter_kernel", "gather_kernel"} if sorted_once else EXPERTS
    assert names(model, world_size, **layout) >= ALWAYS | own


@pytest.mark.parametrize("arch", [90, *full([100])])
def test_fp8(arch):
    model = replace(
        MODEL, ffn_hidden_size=256, moe=replace(MOE, expert_ffn_hidden_size=128), dense_layers=(0,)
    )
    found = names(model, 2, precision="fp8", arch=arch, ep=2)
    quantisers = {"quantize_rows_kernel", "dequantize_rows_kernel", "quantize_weight_kernel"}
    assert found >= ALWAYS | quantisers | {"grouped_mm_fp8_kernel"}


@pytest.mark.full
def test_evaluations_of_experts_with_a_capacity():
    model = replace(MODEL, moe=replace(MOE, dispatcher="symmetric", symmetric_capacity=2.0))
    assert names(model, 2, ep=2) >= ALWAYS | EXPERTS  # which go by all-to-all


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "ep": 2, "etp": 1, "pp": 2}, {"tp": 4}, {"tp": 2, "cp": 2}], ids=str
)
def test_all_ranks_launch_what_is_listed(layout):
    """Also those whose part of the vocabulary is mostly padding: 257 tokens in four parts of 128."""
    layout = ParallelConfig(**layout)
    model = replace(MODEL, moe=MOE, num_layers=2)
    recipe = replace(Recipe(), model=model, parallel=layout, data=DataConfig(seq_len=64))
    of_ranks = [recipe_kernels.codes_of_rank(recipe, rank, 4, 90) for rank in range(4)]
    assert set().union(*of_ranks) == set(recipe_kernels.codes_of_recipe(recipe, 4, 90))


@pytest.mark.full
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=str)
def test_encoders(layout):
    model = replace(MODEL, norm="layernorm", position="learned", activation="gelu", bert=BertConfig())
    parallel, data = ParallelConfig(**layout), DataConfig(seq_len=64, masked_lm=MaskedLMConfig())
    recipe = replace(Recipe(), model=model, parallel=parallel, data=data)
    found = {code.kernel for code in recipe_kernels.codes_of_recipe(recipe, parallel.tp * parallel.pp, 90)}
    assert found >= {"norm_kernel", "norm_backward_kernel", "adamw_kernel"}


@pytest.mark.full
def test_batches_of_any_length_launch_what_is_listed():
    meta = {"device": "meta", "dtype": torch.bfloat16}
    model = GPT(replace(MODEL, num_layers=1, moe=MOE, max_seq_len=6000), Placement(**meta))

    def step(length: int) -> None:
        batch = {
            name: torch.empty(2, length, dtype=torch.int64, device="meta") for name in ("tokens", "targets")
        }
        loss, _, experts, _ = token_loss(model, batch)
        (loss + experts.aux_loss).backward()

    with recording(90) as listed:
        step(64)
    rng = random.Random(0)
    with recording(90) as launched:
        for _ in range(200):
            step(rng.randrange(1, 6000))
    assert set(launched) <= set(listed)


@pytest.mark.full
def test_training_compiles_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Every kernel that is listed lies in the cache, once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(recipe_kernels, "current_architecture", lambda: 90)
    recipe = replace(Recipe(), model=replace(MODEL, num_layers=1), data=DataConfig(seq_len=64))
    recipe_kernels.warm_up_ranks(recipe, Runtime(0, 1, 0, torch.device("cuda")))
    assert not dist.is_initialized()
    assert len(list(tmp_path.rglob("*.cubin"))) == len(recipe_kernels.codes_of_recipe(recipe, 1, 90))


@pytest.mark.full
def test_training_goes_on_without_what_cannot_be_listed(monkeypatch, capfd):
    monkeypatch.setattr(recipe_kernels, "current_architecture", lambda: 90)
    recipe = replace(Recipe(), model=replace(MODEL, max_seq_len=8), data=DataConfig(seq_len=64))
    recipe_kernels.warm_up_ranks(recipe, Runtime(0, 1, 0, torch.device("cuda")))
    assert "kernels were not compiled beforehand, for the reason above" in capfd.readouterr().err


def test_mistakes_on_the_command_line(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[model]\nvocab_size = 257\n")
    assert main(["warm", str(recipe)]) == 2
    assert "no GPU found: choose the target, as arch=90 (--arch 90, an H100)" in capsys.readouterr().err
    assert main(["warm", str(recipe), "--arch", "90", "--tp", "4"]) == 2
    assert "num_heads 6 is not divisible by tp 4" in capsys.readouterr().err


def test_command(tmp_path, capsys, monkeypatch):
    """Kernels of the fewest ranks, for the architecture; compiling them is tested with the ops."""
    recipe, compiled = tmp_path / "recipe.toml", []
    recipe.write_text("[model]\nvocab_size = 257\n[parallel]\ntp = 2\n")
    monkeypatch.setattr(
        recipe_kernels, "compile_all", lambda codes, arch, **options: compiled.append((codes, arch))
    )
    assert main(["warm", str(recipe), "--arch", "90"]) == 0
    ((codes, arch),) = compiled
    assert arch == 90
    assert {code.kernel for code in codes} >= {"norm_kernel", "adamw_kernel"}
    assert f"{len(codes)} kernels for compute capability 9.0" in capsys.readouterr().out
