"""`python -m tools.study overlap`: gain of EP communication overlap between two microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastmp.config import DataConfig, GPTConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig
from fastmp.plan.hardware import GPUS
from fastmp.plan.shapes import shapes_of
from fastmp.plan.step_time import layer_segment_costs, step_time
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.stream_schedule import (
    Launch,
    SegmentCost,
    StreamOp,
    backward_ops,
    forward_ops,
    interleave,
    sequential,
    simulate_streams,
    unit_cost,
)
from tools.study.page import parser, table, write

LAYERS, SHARES = 8, (0.25, 0.5, 1.0, 2.0)
_DRAWN = 2  # layers in the picture
_COMMON: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu"}
MODELS = {  # as their configurations on the Hugging Face hub say
    "Mixtral 8x7B": GPTConfig(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, vocab_size=32000, max_seq_len=4096,
        linear_bias=False, tie_embeddings=False, **_COMMON,
        moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=14336),
    ),
    "Qwen3 30B-A3B": GPTConfig(
        num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_size=128, vocab_size=151936,
        max_seq_len=4096, linear_bias=False, tie_embeddings=False, qk_norm=True, **_COMMON,
        moe=MoEConfig(num_experts=128, top_k=8, expert_ffn_hidden_size=768),
    ),
}  # fmt: skip
# Model, ranks, and how they divide it; servers have 8 GPUs.
LAYOUTS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("Mixtral 8x7B", 64, {"ep": 8, "tp": 4, "etp": 1}),
    ("Mixtral 8x7B", 64, {"ep": 8, "pp": 4, "vpp": 4}),
    ("Qwen3 30B-A3B", 64, {"ep": 8}),
    ("Qwen3 30B-A3B", 64, {"ep": 32}),
    ("Qwen3 30B-A3B", 64, {"ep": 8, "pp": 4}),
    ("Qwen3 30B-A3B", 64, {"ep": 8, "pp": 4, "vpp": 4}),
)
Chains = tuple[tuple[StreamOp, ...], tuple[StreamOp, ...]]


def main(arguments: list[str]) -> int:
    """Write the study's page and pictures; 0, or 2 with one line on stderr."""
    from tools.study.overlap_plot import draw

    made = parser("overlap", "What is gained where exchanges run beside another microbatch's compute.")
    options = made.parse_args(arguments)
    pictures = {"overlap-layers.png": partial(draw, drawn())}
    return write(made.prog, options.out, "overlap", page(), pictures)


def sections(exchange: float, layers: int = LAYERS) -> list[SegmentCost]:
    """Return layers whose attention and experts take 1 each forward; dispatch and combine `exchange` each."""
    return [
        SegmentCost("attention", False, False, 1.0, 1.2, 0.8),
        SegmentCost("dispatch", True, True, exchange, exchange, 0.0),
        SegmentCost("experts", False, False, 1.0, 1.0, 1.0),
        SegmentCost("combine", True, False, exchange, exchange, 0.0),
    ] * layers


def chains(layers: Sequence[SegmentCost], *, defer: bool = True) -> Chains:
    """Return a forward and a backward through `layers`."""
    return forward_ops(layers), backward_ops(layers, defer=defer)


def took(order: Sequence[Launch], *of: Sequence[StreamOp]) -> float:
    """Return the time of an order on one rank."""
    return simulate_streams([order], [of]).makespan


def drawn() -> list[tuple[str, list[tuple[str, bool, str, float, float]]]]:
    """Return (title, ops) of Qwen3 30B-A3B; an op is (segment, exchange, sequence, start, end in ms)."""
    own = _sections("Qwen3 30B-A3B", 64, {"ep": 32}) * _DRAWN
    both = chains(own)
    found = []
    for title, order in (("one after the other", sequential(*both)), ("at once", _order(own))):
        timeline = simulate_streams([order], [both])
        events = []
        for launch, (start, end) in zip(order, timeline.times[0], strict=True):
            op = both[launch.sequence][launch.op]
            chain = "weights" if op.deferred else ("forward", "backward")[launch.sequence]
            events.append((own[op.first].name, op.exchange, chain, 1e3 * start, 1e3 * end))
        found.append((title, events))
    return found


def page() -> str:
    """Return the study's page."""
    return f"""# Gain of EP communication overlap

How much time does training save if the dispatch and combine of one microbatch run during the compute of
another ([EP communication overlap](../pipeline.md#two-microbatches-at-once))? The page is written by:

```sh
python -m tools.study overlap --out docs/studies
```

All times are simulated (`fastmp.schedule.stream_schedule.simulate_streams`), from unit costs or from
`fastmp plan time`. In simulations of unit costs the streams don't slow each other down; estimates of models
count the multiprocessors that collective kernels take from compute.

## Layers

A forward and a backward through {LAYERS} layers. In the forward pass, attention and experts take 1 each,
dispatch and combine the time in the first column; compute of the backward pass takes twice as long.

- **weights deferred**: one microbatch; its wgrad GEMMs run during the next exchange.
- **at once**: two microbatches, in the order used by training, made without knowing these times.
- **planned**: two microbatches, in an order made for these times.
- **bound**: the work of the longer stream.

{table(_LAYER_HEADER, [*_layer_rows()])}
## Models

Seconds of a step on H100s, with 512 sequences of 4096 tokens in microbatches of one, without recomputation.

- **exchanges**: share of dispatch and combine in the time of a layer.
- **hidden**: share of the exchanges hidden while a forward and a backward run at once. Warm-up and
  cool-down of a step hide nothing.
- **in flight**: microbatches in flight on the first pipeline rank, without and with overlap.

To enable it, add `--parallel.overlap-experts` to `fastmp train`: see [Overlap
communication](../how-to/overlap.md).

{table(_MODEL_HEADER, [*_model_rows()])}
![two streams of a rank, one microbatch after the other, and both at once](overlap-layers.png)

{_DRAWN} layers of Qwen3 30B-A3B with 32 expert-parallel ranks in four servers: exchanges take longer than
compute, so a part of them stays exposed.
"""


_LAYER_HEADER = ["exchange", "one after the other", "weights deferred", "at once", "planned", "bound"]
_MODEL_HEADER = ["model", "layout", "exchanges", "hidden", "seconds", "at once", "gain", "in flight"]


def _layer_rows() -> Iterator[list[str]]:
    for exchange in SHARES:
        own = sections(exchange)
        forward, backward = both = chains(own)
        whole = chains(own, defer=False)
        times = (
            took(sequential(*whole), *whole),
            took(interleave(forward), forward) + took(interleave(backward), backward),
            took(_order(own), *both),
            took(interleave(*both), *both),
            max(sum(p.time for each in both for p in each if p.exchange == kind) for kind in (False, True)),
        )
        yield [f"{exchange:g}", *(f"{time:.1f}" for time in times)]


def _order(layers: Sequence[SegmentCost]) -> tuple[Launch, ...]:
    """Return the order in which training runs a forward beside a backward through `layers`."""
    return interleave(*chains(unit_cost(layers)))


def _recipe(name: str, layout: dict[str, int], overlapped: bool = False) -> Recipe:
    return Recipe(
        model=MODELS[name],
        parallel=ParallelConfig(**layout, overlap_experts=overlapped),  # type: ignore[arg-type]
        data=DataConfig(seq_len=4096, micro_batch_size=1),
        train=TrainConfig(global_batch_size=512, dtype="bfloat16"),
    )


def _sections(name: str, ranks: int, layout: dict[str, int]) -> tuple[SegmentCost, ...]:
    recipe = _recipe(name, layout)
    shapes = replace(shapes_of(recipe, ranks), model=recipe.model.layers[0])
    return layer_segment_costs(shapes, GPUS["h100"])


def _model_rows() -> Iterator[list[str]]:
    for name, ranks, layout in LAYOUTS:
        own = _sections(name, ranks, layout) * LAYERS
        both = chains(own)
        exchanged = sum(part.time for each in both for part in each if part.exchange)
        apart = sum(part.time for each in both for part in each)
        hidden = apart - took(_order(own), *both)
        recipes = [_recipe(name, layout, overlapped) for overlapped in (False, True)]
        before, after = (step_time(recipe, ranks, GPUS["h100"]).seconds for recipe in recipes)
        pp, vpp = recipes[0].parallel.pp, recipes[0].parallel.vpp
        microbatches = recipes[0].train.global_batch_size * recipes[0].parallel.tp * pp // ranks
        held = [Schedule(pp, microbatches, vpp, overlap=each).peak_in_flight(0) for each in (False, True)]
        yield [
            name,
            " x ".join(f"{axis} {size}" for axis, size in layout.items()),
            f"{exchanged / apart:.0%}",
            f"{hidden / exchanged:.0%}",
            f"{before:.2f}",
            f"{after:.2f}",
            f"{before / after:.2f}x",
            " to ".join(f"{number / vpp:.3g}" for number in held),
        ]
