"""`python -m tools.study graphs`: launches saved by partial CUDA graph capture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastmp.config import DataConfig, GPTConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig
from fastmp.plan.graphs import graph_facts
from fastmp.plan.hardware import GPUS
from fastmp.plan.kernels import FASTMP
from fastmp.plan.step_time import ONCE, step_time
from fastmp.schedule.scope import captured_segments
from tools.study.page import Draw, machine, measurement, parser, save, table, write

SCOPES: dict[str, dict[str, tuple[str, ...]]] = {
    "dense": {"eager": (), "attn": ("attn",), "full layer": ("attn", "mlp")},
    "moe": {
        "eager": (),
        "attn": ("attn",),
        "attn, moe_router": ("attn", "moe_router"),
        "attn, moe_router, moe_preprocess": ("attn", "moe_router", "moe_preprocess"),
        "full layer (one rank)": ("attn", "moe"),
    },
}
PARTIAL = "attn, moe_router, moe_preprocess"
_DISPATCHERS = ("alltoall", "symmetric")
_TOKENS = (256, 1024, 4096, 16384)
Counts = dict[str, dict[str, tuple[int, int]]]


def main(arguments: list[str]) -> int:
    """Write the study's page and picture; 0, or 2 with one line on stderr."""
    from tools.study.graphs_plot import draw_hosts

    made = parser(
        "graphs", "CPU time saved by partial CUDA graph capture, by launches.", measures="host times"
    )
    options = made.parse_args(arguments)
    try:
        file = Path(options.out, "graphs.json")
        kept = None if options.measure else measurement(made.prog, file, _needs())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    counts, measured = count(), kept or measure()
    pictures: dict[str, Draw] = {
        "graphs-host.png": partial(draw_hosts, measured["host_us"], gpu_us()),
        "graphs.json": partial(save, measured),
    }
    return write(made.prog, options.out, "graphs", page(counts, measured), pictures)


def _needs() -> Iterator[tuple[str, ...]]:
    """Yield the keys of what the page takes from a measurement."""
    yield from (("cpu",), ("torch",))
    yield from (("host_us", kind, name) for kind, scopes in SCOPES.items() for name in scopes)


def count() -> Counts:
    """Return {kind of layer: {segment: (launches forward, backward)}}."""
    from tools.study.launches import count_launches

    return {kind: count_launches(kind) for kind in SCOPES}


def measure() -> dict[str, Any]:
    """Measure CPU microseconds for a layer and microbatch, eager and with each graph scope."""
    from tools.study.launches import host_seconds

    found = {}
    for kind, scopes in SCOPES.items():
        seconds = host_seconds(kind, [*scopes.values()])
        found[kind] = {name: round(1e6 * took, 1) for name, took in zip(scopes, seconds, strict=True)}
    return {**machine(), "host_us": found}


def _recipe(tokens: int, dispatcher: str = "alltoall") -> Recipe:
    """Return Qwen3-30B-A3B with its experts over 8 ranks, microbatches of `tokens` tokens on each rank."""
    model = GPTConfig(
        num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_size=128, vocab_size=151936,
        max_seq_len=16384, norm="rmsnorm", position="rope", activation="swiglu", linear_bias=False,
        tie_embeddings=False, qk_norm=True,
        moe=MoEConfig(num_experts=128, top_k=8, expert_ffn_hidden_size=768, dispatcher=dispatcher),
    )  # fmt: skip
    return Recipe(
        model=model,
        parallel=ParallelConfig(ep=8),
        data=DataConfig(seq_len=tokens, micro_batch_size=1),
        train=TrainConfig(global_batch_size=64, dtype="bfloat16"),
    )


def gpu_us() -> dict[int, float]:
    """Return {tokens of a microbatch: predicted us of a layer's kernels on an H100, forward and backward}."""
    found = {}
    for tokens in _TOKENS:
        recipe = _recipe(tokens)
        more = replace(recipe, model=replace(recipe.model, num_layers=2 * recipe.model.num_layers))
        once, twice = (_in_layers(each) for each in (recipe, more))
        microbatches = recipe.train.global_batch_size // 8
        found[tokens] = 1e6 * (twice - once) / (recipe.model.num_layers * microbatches)
    return found


def _in_layers(recipe: Recipe) -> float:
    parts = step_time(recipe, 8, GPUS["h100"], replace(FASTMP, host=0.0)).parts  # of the GPU alone
    return sum(took for (phase, _), took in parts.items() if phase != ONCE)


def page(counts: Counts, measured: dict[str, Any]) -> str:
    """Return the study's page."""
    captured = [graph_facts(_recipe(4096, dispatcher), 8)["captured"] for dispatcher in _DISPATCHERS]
    host, gpu = measured["host_us"], gpu_us()
    eager, partly = host["moe"]["eager"], host["moe"][PARTIAL]
    bound = [tokens for tokens, took in gpu.items() if took < eager]
    pace = ["tokens", "GPU us", "eager: slower is", "partial capture: slower is", "faster by"]
    return f"""# CPU time saved by CUDA graphs

How much CPU time does graph capture save, and at which batch sizes does the saving shorten a step? The page
is written by:

```sh
python -m tools.study graphs --out docs/studies   # --measure: also take the CPU times again, on your machine
```

Eager code launches op after op; a replay launches all captured segments of a layer at once. With an
all-to-all dispatcher, the host has to know the number of received tokens, so dispatch,
experts and combine stay eager (see [CUDA graphs](../cuda-graphs.md)). With the
[symmetric dispatcher](../moe.md), the whole layer is captured.

## Launches of a layer

Kernel launches in the forward and backward pass of a layer; some of fastmp's ops launch two. The last two
columns are the segments captured for Qwen3-30B-A3B with 8 expert-parallel ranks and an empty scope, by
dispatcher. For your model, run `fastmp plan graphs`.

{table(["segment", "forward", "backward", *_DISPATCHERS], [*_segment_rows(counts["moe"], captured)])}
A dense layer launches {_total(counts["dense"])}: {_described(counts["dense"])}.

## CPU time saved by capture

Launches and CPU time of a layer and microbatch, forward and backward:

- **left**: launches of eager segments, and one per replay. Copying inputs into static buffers would cost
  one more.
- **host us**: measured CPU time at the smallest shapes, on one thread of {measured["cpu"]} (torch
  {measured["torch"]}), least of 320 microbatches, while other work ran. Graphs are replaced by empty calls,
  so only the CPU work around a replay counts. Small CPU kernels of eager segments are included, calls of
  the CUDA driver are not.

{table(["layer", "in graphs", "launches", "left", "host us", "saved"], [*_scope_rows(counts, host)])}
Each removed launch saves {_per_launch(counts, host):.0f} us of CPU time on this machine. A layer is
captured whole if all experts are on one rank, or with the symmetric dispatcher; with an all-to-all, partial
capture still saves {(eager - partly) / eager:.0%} of the CPU time.

![CPU time of a layer, eager and in graphs, beside the GPU's time](graphs-host.png)

## Batch sizes with a speed-up

Predicted time of a layer of Qwen3-30B-A3B on an H100 (`fastmp plan time`, 8 GPUs, 8 expert-parallel ranks),
by tokens of a microbatch, next to the CPU times above. Capture shortens a step if launching takes longer
than the GPU's work, here with microbatches of
{", ".join(f"{tokens:,}" for tokens in bound) or "none of these"} tokens.

{table(pace, [*_pace_rows(gpu, host["moe"])])}
These are estimates from this machine's CPU times and the GPU's data sheet: a faster CPU or slower kernels
move the border. On your GPU, measure both with
[`benchmarks.gpu_check`](../benchmarks.md#check-and-time-a-gpu).
"""


def _segment_rows(counts: dict[str, tuple[int, int]], captured: list[list[str]]) -> Iterator[list[str]]:
    for name, (forward, backward) in counts.items():
        yield [
            name,
            f"{forward}",
            f"{backward}",
            *("in a graph" if name in own else "eager" for own in captured),
        ]


def _scope_rows(counts: Counts, host: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    for kind, scopes in SCOPES.items():
        eager = host[kind]["eager"]
        for name in scopes:
            took = host[kind][name]
            saved = "" if name == "eager" else f"{eager - took:.0f} us, {(eager - took) / eager:.0%}"
            left = _left(counts[kind], scopes[name])
            yield [kind, name, f"{_total(counts[kind])}", f"{left}", f"{took:.0f}", saved]


def _pace_rows(gpu: dict[int, float], host: dict[str, float]) -> Iterator[list[str]]:
    for tokens, took in gpu.items():
        pace = [max(took, host[name]) for name in ("eager", PARTIAL)]
        cells = [f"host, {own:.0f} us" if own > took else f"GPU, {own:.0f} us" for own in pace]
        yield [f"{tokens:,}", f"{took:.0f}", *cells, f"{pace[0] / pace[1]:.2f}x"]


def _total(counts: dict[str, tuple[int, int]]) -> int:
    return sum(map(sum, counts.values()))


def _left(counts: dict[str, tuple[int, int]], scope: tuple[str, ...]) -> int:
    """Return the launches of segments that are not captured, and of the two replays of a layer's run."""
    inside = captured_segments(scope, dict.fromkeys(counts, True)) if scope else set()
    return sum(sum(own) for name, own in counts.items() if name not in inside) + 2 * bool(scope)


def _per_launch(counts: Counts, host: dict[str, dict[str, float]]) -> float:
    removed = _total(counts["moe"]) - _left(counts["moe"], SCOPES["moe"][PARTIAL])
    return (host["moe"]["eager"] - host["moe"][PARTIAL]) / removed


def _described(counts: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} {forward} + {backward}" for name, (forward, backward) in counts.items())
