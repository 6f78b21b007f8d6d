"""Published results of training on GPUs: shapes, layouts and figures, each with its source.

Pipelines of A100s are Table 1 of Narayanan et al. 2021 (arXiv 2104.04473); the H100 rows are Table 4 of Dubey
et al. 2024 (arXiv 2407.21783), as shown again at SC24 (glennklockwood.com/garden/llama-3.1); that of H800s is
section 1 of DeepSeek-AI 2024 (arXiv 2412.19437). Of the table of 2021 the shapes were compared with its
parameters, and the last row with the 502 PFLOP/s of the paper's abstract; nothing else of it was compared
with a source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fastmp.config import DataConfig, GPTConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from fastmp.config.recipe import load_recipe
from fastmp.config.sizes import flops_per_token

CONFIGS = Path(__file__).parents[2] / "configs"

PADDED = 51_200  # words with those that only make the table divisible, for all rows but those of H100s


@dataclass(frozen=True)
class Run:
    """A run on A100s or H100s: its recipe, and the TFLOP/s of a GPU that were published."""

    name: str
    recipe: Recipe
    gpus: int
    tflops: float


def a100_runs() -> list[Run]:
    """Return the runs of Narayanan et al. 2021: 51,200 tokens, sequences of 2048, layers recomputed.

    Table 1 does not say the size of a microbatch, here one sequence, nor the chunks of a rank, here 2, or 3
    where 2 do not divide its layers.
    """
    rows = (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163), (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )  # fmt: skip
    found = []
    for billions, heads, hidden, layers, tp, pp, gpus, batch, tflops in rows:
        vpp = 1 if pp == 1 else 2 if layers // pp % 2 == 0 else 3
        model = GPTConfig(
            num_layers=layers, hidden_size=hidden, num_heads=heads, dropout=0.1, vocab_size=PADDED,
            max_seq_len=2048,
        )  # fmt: skip
        layout = ParallelConfig(tp=tp, pp=pp, vpp=vpp, recompute=True)
        found.append(Run(f"{billions} B", gpt_recipe(model, layout, 1, batch, "bfloat16"), gpus, tflops))
    return found


def h100_runs() -> list[Run]:
    """Return the runs of Llama 3 405B with sequences of 8192: nothing recomputed, one layer a chunk."""
    model = GPTConfig(
        num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, ffn_hidden_size=53248,
        vocab_size=128256, max_seq_len=8192, norm="rmsnorm", position="rope", activation="swiglu",
        linear_bias=False, tie_embeddings=False,
    )  # fmt: skip
    layout = ParallelConfig(tp=8, pp=16, vpp=8, sequence_parallel=True, stage_layers=(0, *[1] * 126, 0))
    return [
        Run("405 B", gpt_recipe(model, layout, 1, 2048, "bfloat16", shard=True), gpus, tflops)
        for gpus, tflops in ((8192, 430.0), (16384, 400.0))
    ]


def h800_runs() -> list[Run]:
    """Return the run of DeepSeek-V3 (arXiv 2412.19437): 180,000 GPU hours for 10^12 tokens.

    FP8, DualPipe with the exchanges of two microbatches overlapped, keys and values made again in backward;
    norms and SwiGLU were, too, which is not counted. Which layers a rank has was not published: here the rank
    of both heads and the MTP module has none.
    """
    recipe = load_recipe(CONFIGS / "deepseek-v3.toml")
    assert recipe.model.moe is not None
    recipe = replace(
        recipe,
        model=replace(recipe.model, moe=replace(recipe.model.moe, dispatcher="deepep")),
        train=replace(recipe.train, precision="fp8"),
        parallel=replace(
            recipe.parallel, recompute=False, recompute_kv=True, vpp=2, schedule="dualpipe_v",
            overlap_experts=True, stage_layers=(0, 3, *[2] * 29, 0),
        ),
    )  # fmt: skip
    tokens = 1e12 / 180e3 / 3600  # a second and GPU
    flops = tokens * flops_per_token(recipe.model, recipe.data.seq_len, causal=True)
    return [Run("DeepSeek-V3", recipe, 2048, flops / 1e12)]


def gpt_recipe(
    model: GPTConfig, layout: ParallelConfig, micro: int, batch: int, dtype: str, *, shard: bool = False
) -> Recipe:
    """Return a recipe: microbatches of `micro` sequences, `batch` sequences a step, ZeRO-1 with `shard`."""
    return Recipe(
        model=model,
        parallel=layout,
        data=DataConfig(seq_len=model.max_seq_len, micro_batch_size=micro),
        optimizer=OptimizerConfig(shard=shard, grad_dtype="float32" if shard else "bfloat16"),
        train=TrainConfig(global_batch_size=batch, dtype=dtype),
    )
