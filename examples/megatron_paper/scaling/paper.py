"""Published scaling of Megatron-LM: shapes, layouts and figures, each with its source.

The tables are those of Shoeybi et al. 2019 (arXiv 1909.08053); rows of 2020 are images/tables.tex of
github.com/NVIDIA/Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastmp.config import GPTConfig, ParallelConfig, Recipe
from tools.study.published import PADDED, Run, gpt_recipe

SEQUENCE, VOCABULARY, BATCH = 1024, 50257, 8
EPOCH = 68_507  # steps of 512 sequences of 1024 tokens

BASELINE = 39e12  # FLOP/s of one V100 with the model of 1.2 B parameters, 30 % of its peak
MODEL_PARALLEL, HYBRID, HYBRID_IN_ABSTRACT = 0.77, 0.74, 0.76  # on 8 and 512 GPUs
HYBRID_FLOPS = 15.1e15  # a second, of all 512 GPUs
OF_HEADS = {16: 0.82, 24: 0.80, 32: 0.77}  # Table 7: {attention heads: efficiency} of 8.3 B on 8 GPUs
SPEEDUP = {1: 1.0, 2: 1.64, 4: 2.34, 8: 2.98}  # Table 8: {GPUs: times as fast as one} of 1.2 B


@dataclass(frozen=True)
class Shape:
    """A GPT-2 of Megatron-LM: its sizes, and the ranks that divide it."""

    name: str
    hidden: int
    heads: int
    layers: int
    tp: int

    def recipe(self, *, batch: int = BATCH, tp: int | None = None, heads: int | None = None) -> Recipe:
        """Return its recipe: layers recomputed, 8 sequences a replica, 16-bit gradients summed by DDP."""
        return gpt_recipe(
            GPTConfig(
                num_layers=self.layers, hidden_size=self.hidden, num_heads=heads or self.heads, dropout=0.1,
                vocab_size=VOCABULARY, max_seq_len=SEQUENCE,
            ),
            ParallelConfig(tp=tp or self.tp, recompute=True), BATCH, batch, "float16",
        )  # fmt: skip


# Table 1: hidden size, heads, layers, and GPUs that divide the model. With 64 replicas, 64 to 512 GPUs.
TABLE_1 = (
    Shape("1.2 B", 1536, 16, 40, 1),
    Shape("2.5 B", 1920, 20, 54, 2),
    Shape("4.2 B", 2304, 24, 64, 4),
    Shape("8.3 B", 3072, 32, 72, 8),
)
REPLICAS = 64
# Table 2: (model, GPUs, days of an epoch).
TRAINED = (
    (Shape("355 M", 1024, 16, 24, 1), 64, 0.86),
    (Shape("2.5 B", 1920, 20, 54, 2), 128, 2.27),
    (Shape("8.3 B", 3072, 24, 72, 8), 512, 2.10),
)


# The sizes of 2020, and what they reached: TFLOP/s of a GPU on a V100 with a batch of 8, on an A100 with one
# of 16, and on A100s in 128 replicas with one of 2048.
CASES = (
    (Shape("1.16 B", 1920, 15, 24, 1), (71.9, 149.8, 139.8)),
    (Shape("2.03 B", 2304, 18, 30, 2), (64.2, 136.8, 127.5)),
    (Shape("4.24 B", 3072, 24, 36, 4), (58.5, 124.7, 116.7)),
    (Shape("8.67 B", 4096, 32, 42, 8), (52.2, 109.3, 106.5)),
)
CASE_MS = (1121, 1093, 1238, 1407)  # of a step on V100s, of the same table
CASE_REPLICAS = 128


def counted_flops(recipe: Recipe) -> float:
    """Return the FLOPs of a step by formula (3) of Narayanan et al. 2021, with recomputation and logits.

    It gives the TFLOP/s of `CASES` from their milliseconds. How FLOPs were counted in 2019 was not said.
    """
    model, s = recipe.model, recipe.data.seq_len
    h, layers, tokens = model.hidden_size, model.num_layers, recipe.train.global_batch_size * s
    return 96.0 * tokens * layers * h * h * (1 + s / (6 * h) + PADDED / (16 * layers * h))


def case_runs() -> list[tuple[str, Run]]:
    """Return the runs of 2020, each with its GPU's name: layers recomputed, a replica's batch at once."""
    found = []
    kinds = (("v100", BATCH, 1), ("a100", 2 * BATCH, 1), ("a100", 2 * BATCH, CASE_REPLICAS))
    for column, (gpu, micro, replicas) in enumerate(kinds):
        for shape, tflops in CASES:
            recipe = shape.recipe(batch=micro * replicas)
            recipe = replace(recipe, data=replace(recipe.data, micro_batch_size=micro))
            found.append((gpu, Run(shape.name, recipe, shape.tp * replicas, tflops[column])))
    return found
