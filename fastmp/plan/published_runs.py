"""Published training runs on H100, H200, B200 and GB200: recipes and tokens/s of a GPU, each with its source.

Nothing is calibrated to them. A recipe has what the source says; where it says nothing, activations are kept,
experts are balanced (as the sources force them to be), and layers are divided evenly. FP8 runs of others have
their wgrads in FP8 as well, fastmp's in BF16. FSDP is counted as ZeRO-1, whose traffic is two thirds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fastmp.config import (
    DataConfig,
    GPTConfig,
    LatentConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.config.sizes import num_parameters
from fastmp.plan.hardware import GPUS
from fastmp.plan.kernels import FASTMP, FP8_WGRADS
from fastmp.plan.space import divide_layers, graphs_of
from fastmp.plan.step_time import StepTime, step_time

_LLAMA: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "linear_bias": False}
_QWEN3: dict[str, Any] = {
    **_LLAMA,
    "num_kv_heads": 4,
    "head_size": 128,
    "qk_norm": True,
    "tie_embeddings": False,
}


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=8, ffn_hidden_size=ffn,
        vocab_size=128256, max_seq_len=8192, tie_embeddings=False, **_LLAMA,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, expert_ffn: int) -> GPTConfig:
    moe = MoEConfig(num_experts=128, top_k=8, expert_ffn_hidden_size=expert_ffn, normalize_topk=True)
    return GPTConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=151936, max_seq_len=4096,
        moe=moe, **_QWEN3,
    )  # fmt: skip


def _mpt(layers: int, hidden: int, heads: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=50368, max_seq_len=2048,
        linear_bias=False, activation="gelu",
    )  # fmt: skip


_DEEPSEEK = GPTConfig(
    num_layers=61, hidden_size=7168, num_heads=128, ffn_hidden_size=18432, vocab_size=129280,
    max_seq_len=4096, tie_embeddings=False, dense_layers=(0, 1, 2), **_LLAMA,
    latent=LatentConfig(kv_rank=512, q_rank=1536, nope_size=128, rope_size=64, value_size=128),
    moe=MoEConfig(
        num_experts=256, top_k=8, expert_ffn_hidden_size=2048, shared_expert_ffn_hidden_size=2048,
        score="sigmoid", normalize_topk=True, num_groups=8, group_topk=4,
    ),
)  # fmt: skip
MODELS = {
    "Llama 3 8B": _llama(32, 4096, 32, 14336),
    "Llama 3 70B": _llama(80, 8192, 64, 28672),
    "Llama 3 405B": _llama(126, 16384, 128, 53248),
    "Qwen3 30B-A3B": _qwen3(48, 2048, 32, 768),
    "Qwen3 235B-A22B": _qwen3(94, 4096, 64, 1536),
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-V3 with MTP": replace(_DEEPSEEK, mtp_depth=1),
    "MPT 1B": _mpt(24, 2048, 16),
    "MPT 3B": _mpt(32, 2560, 20),
    "MPT 7B": _mpt(32, 4096, 32),
    "MPT 13B": _mpt(40, 5120, 40),
    "MPT 30B": _mpt(48, 7168, 56),
    "MPT 70B": _mpt(80, 8192, 64),
}


@dataclass(frozen=True)
class Publication:
    """A page of results: its name, address, commit or version, and date."""

    name: str
    address: str
    version: str
    date: str


_BRIDGE = "github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary.md"
BRIDGE_26 = Publication("Megatron-Bridge 26.02", _BRIDGE, "df0289c", "2026-02")
BRIDGE_25 = Publication("Megatron-Bridge 25.11", _BRIDGE, "00b7660", "2025-11")
BRIDGE_09 = Publication("Megatron-Bridge 25.09", _BRIDGE, "df0289c", "2025-09")
MEGATRON = Publication(
    "Megatron-LM moe_recipes", "github.com/NVIDIA/Megatron-LM/pull/5728", "recipes 256f606", "2026-07-09"
)
AUTOMODEL = Publication(
    "NeMo Automodel",
    "github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.md",
    "01926a5",
    "2025-10-02",
)
MOSAIC = Publication(
    "MosaicML llm-foundry",
    "github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "061f2c7",
    "no date",
)
TITAN = Publication(
    "torchtitan",
    "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "9dec370",
    "2024-12-26",
)
TRAINY = Publication(
    "torchtitan, Trainy",
    "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "e7c0cae",
    "2025-06-13",
)


@dataclass(frozen=True)
class PublishedRun:
    """A run: its model, GPUs and recipe, and the tokens/s of a GPU that were published.

    note: why the run says little of the estimate; such runs are left out of the bounds of residuals.
    """

    model: str
    hardware: str
    gpus: int
    recipe: Recipe
    tokens_per_second: float
    source: Publication
    note: str = ""

    @property
    def name(self) -> str:
        """Model, precision and GPUs."""
        precision = "FP8" if self.recipe.train.precision == "fp8" else "BF16"
        return f"{self.model} {precision}, {self.gpus} x {self.hardware.upper()}"


def _run(
    model: str,
    hardware: str,
    gpus: int,
    tokens: float,
    source: Publication,
    *,
    samples: int,
    micro: int = 1,
    fp8: bool = False,
    recompute: bool = False,
    graphs: str = "none",
    note: str = "",
    length: int | None = None,
    **layout: Any,
) -> PublishedRun:
    """Return a run of `samples` sequences a step, microbatches of `micro` and the axes of `layout`."""
    config = MODELS[model]
    length = length or config.max_seq_len
    if config.moe is not None:
        config = replace(config, moe=replace(config.moe, dispatcher="deepep"))
    pp, vpp = layout.get("pp", 1), layout.get("vpp", 1)
    own = ParallelConfig(
        **layout,
        etp=1 if config.moe is not None else None,
        sequence_parallel=layout.get("tp", 1) > 1,
        recompute=recompute,
        stage_layers=divide_layers(config, length, pp, vpp, "looped"),
    )
    train = TrainConfig(
        global_batch_size=samples, dtype="bfloat16", precision="fp8" if fp8 else "dtype", name=model
    )
    recipe = Recipe(config, own, DataConfig(seq_len=length, micro_batch_size=micro), OptimizerConfig(), train)
    return PublishedRun(
        model, hardware, gpus, replace(recipe, graphs=graphs_of(graphs)), tokens, source, note
    )


# FLOPs of a token by which the publisher of TFLOP/s gives tokens/s elsewhere (Megatron-Bridge 25.11).
_QWEN3_30B_FLOPS, _QWEN3_235B_FLOPS = 547e12 / 23766, 728e12 / 4916


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return all runs, by GPU and model."""
    return tuple(_runs())


def _runs() -> Iterator[PublishedRun]:
    yield from _dense_h100()
    yield from _moe_h100()
    for gpus, tokens in ((32, 10938), (64, 10753)):
        yield _run("Llama 3 8B", "h200", gpus, tokens, TRAINY, samples=2 * gpus, micro=2, fp8=True)
    yield from _blackwell()


def _dense_h100() -> Iterator[PublishedRun]:
    for model, gpus, samples, micro, again, tokens in (
        ("MPT 1B", 8, 112, 14, False, 45455), ("MPT 3B", 16, 480, 10, False, 24142),
        ("MPT 7B", 8, 48, 6, False, 10643), ("MPT 13B", 8, 16, 2, False, 4792),
        ("MPT 13B", 64, 128, 2, False, 4800), ("MPT 30B", 8, 504, 3, True, 2002),
        ("MPT 30B", 32, 1344, 14, True, 2308), ("MPT 70B", 64, 2048, 8, True, 1039),
    ):  # fmt: skip
        yield _run(model, "h100", gpus, tokens, MOSAIC, samples=samples, micro=micro, recompute=again)
    for gpus, tokens in ((8, 6667), (128, 6514)):
        note = "GPUs of 500 W and 2.4 TB/s"
        yield _run("Llama 3 8B", "h100", gpus, tokens, TITAN, samples=2 * gpus, micro=2, note=note)
    yield _run("Llama 3 8B", "h100", 8, 14451, BRIDGE_25, samples=128, fp8=True)
    yield _run("Llama 3 70B", "h100", 64, 1621, BRIDGE_26, samples=256, fp8=True, tp=4, pp=8, vpp=5)
    yield _run("Llama 3 405B", "h100", 1024, 311, BRIDGE_26, samples=1536, fp8=True, tp=8, cp=2, pp=8, vpp=8)


def _moe_h100() -> Iterator[PublishedRun]:
    yield _run("Qwen3 30B-A3B", "h100", 8, 12040, AUTOMODEL, samples=512, micro=4, ep=8, recompute=True)
    yield _run("Qwen3 30B-A3B", "h100", 32, 240.5e12 / _QWEN3_30B_FLOPS, MEGATRON, samples=256, ep=8)
    yield _run(
        "Qwen3 30B-A3B", "h100", 16, 5275, BRIDGE_25, samples=512, micro=2, fp8=True, pp=2, vpp=24, ep=8,
        note="host-bound: twice as fast with dropped tokens (25.09), and in other rows",
    )  # fmt: skip
    yield _run(
        "Qwen3 235B-A22B", "h100", 256, 302.0e12 / _QWEN3_235B_FLOPS, MEGATRON, samples=2048, tp=2, pp=8,
        vpp=4, ep=32, overlap_experts=True, graphs="layers",
    )  # fmt: skip
    yield _run(
        "Qwen3 235B-A22B", "h100", 256, 1633, BRIDGE_26, samples=8192, fp8=True, tp=2, pp=8, vpp=4, ep=32
    )
    for gpus, samples, tokens in ((256, 512, 1002), (1024, 8192, 865)):
        yield _run(
            "DeepSeek-V3",
            "h100",
            gpus,
            tokens,
            AUTOMODEL,
            samples=samples,
            pp=4,
            vpp=8,
            ep=64,
            recompute=True,
        )
    yield _run(
        "DeepSeek-V3", "h100", 1024, 1297, BRIDGE_09, samples=8192, fp8=True, tp=2, pp=8, vpp=4, ep=64,
        overlap_experts=True,
    )  # fmt: skip


def _blackwell() -> Iterator[PublishedRun]:
    yield _run("Llama 3 8B", "b200", 8, 30624, BRIDGE_25, samples=128, micro=2, fp8=True)
    yield _run("Llama 3 405B", "b200", 128, 661, BRIDGE_25, samples=64, fp8=True, tp=4, cp=2, pp=8, vpp=8)
    yield _run(
        "Qwen3 30B-A3B", "b200", 8, 9691, BRIDGE_26, samples=512, fp8=True, ep=8,
        note="host-bound: microbatches of 1, 18,066 with dropped tokens in 25.09",
    )  # fmt: skip
    yield _run("Qwen3 235B-A22B", "b200", 256, 3805, BRIDGE_26, samples=8192, fp8=True, pp=8, ep=8)
    yield _run("DeepSeek-V3 with MTP", "b200", 256, 2689, BRIDGE_26, samples=4096, fp8=True, pp=16, ep=8)
    yield _run("Llama 3 8B", "gb200", 8, 31508, BRIDGE_25, samples=128, micro=2, fp8=True)
    yield _run("Llama 3 70B", "gb200", 64, 4040, BRIDGE_26, samples=256, micro=2, fp8=True)
    yield _run("Llama 3 405B", "gb200", 256, 793, BRIDGE_26, samples=1536, fp8=True, tp=4, pp=16, vpp=4)
    yield _run("Qwen3 30B-A3B", "gb200", 8, 26084, BRIDGE_26, samples=512, micro=4, fp8=True, ep=8)
    yield _run(
        "Qwen3 30B-A3B", "gb200", 16, 504.2e12 / _QWEN3_30B_FLOPS, MEGATRON, samples=512, micro=4, ep=16
    )
    yield _run(
        "Qwen3 235B-A22B", "gb200", 256, 4916, BRIDGE_25, samples=8192, pp=8, vpp=3, ep=32, graphs="layers"
    )
    yield _run("Qwen3 235B-A22B", "gb200", 256, 5448, BRIDGE_26, samples=8192, fp8=True, pp=8, ep=32)
    yield _run("DeepSeek-V3", "gb200", 256, 3139, BRIDGE_25, samples=4096, pp=4, vpp=4, ep=64)
    yield _run(
        "DeepSeek-V3 with MTP", "gb200", 256, 3955, BRIDGE_26, samples=4096, fp8=True, pp=4, vpp=4, ep=64
    )


def step_time_elsewhere(recipe: Recipe, gpus: int, hardware: str) -> StepTime:
    """Return the step time of other software, which also computes wgrads in FP8."""
    kernels = FP8_WGRADS if recipe.train.precision == "fp8" else FASTMP
    return step_time(recipe, gpus, GPUS[hardware], kernels)


@cache
def estimated(run: PublishedRun) -> StepTime:
    """Return the estimate of a published run."""
    return step_time_elsewhere(run.recipe, run.gpus, run.hardware)


def residual(run: PublishedRun) -> float:
    """Return the estimated tokens/s of a GPU over the published ones."""
    return estimated(run).tokens_per_second / run.gpus / run.tokens_per_second


NEAR = 4.0  # factors of two, within which a run says something of an estimate


def run_distance(run: PublishedRun, recipe: Recipe, gpus: int, hardware: str) -> float:
    """Return how far a published run is from a recipe on GPUs, in factors of two.

    They are those in active parameters, in the share of active ones and, by half, in GPUs; another GPU counts
    as two of them, another precision as a half.
    """
    own, other = (
        (num_parameters(each.model, active=True), num_parameters(each.model)) for each in (recipe, run.recipe)
    )
    far = abs(math.log2(own[0] / other[0]))
    far += abs(math.log2(own[0] / own[1]) - math.log2(other[0] / other[1]))
    far += abs(math.log2(gpus / run.gpus)) / 2 + 2 * (hardware != run.hardware)
    far += (recipe.train.precision != run.recipe.train.precision) / 2
    return round(far, 9)


def nearest_run(recipe: Recipe, gpus: int, hardware: str) -> PublishedRun:
    """Return the published run that resembles a recipe most, by `run_distance`, then by name."""
    return min(published_runs(), key=lambda run: (run_distance(run, recipe, gpus, hardware), run.name))
