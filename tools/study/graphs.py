"""`python -m tools.study graphs`: launches saved by partial CUDA graph capture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastmp.config import DataConfig, GPTConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig
from fastmp.cuda_graphs.scope import captured_segments
from fastmp.plan.graphs import graph_facts
from fastmp.plan.hardware import GPUS
from fastmp.plan.step_time import ONCE, step_time
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
        "graphs", "What partial capture saves, by the launches that it removes.", measures="host times"
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
    """Return {tokens of a microbatch: predicted microseconds of a layer on an H100, forward and backward}."""
    found = {}
    for tokens in _TOKENS:
        recipe = _recipe(tokens)
        more = replace(recipe, model=replace(recipe.model, num_layers=2 * recipe.model.num_layers))
        once, twice = (_in_layers(each) for each in (recipe, more))
        microbatches = recipe.train.global_batch_size // 8
        found[tokens] = 1e6 * (twice - once) / (recipe.model.num_layers * microbatches)
    return found


def _in_layers(recipe: Recipe) -> float:
    parts = step_time(recipe, 8, GPUS["h100"]).parts
    return sum(took for (phase, _), took in parts.items() if phase != ONCE)


def page(counts: Counts, measured: dict[str, Any]) -> str:
    """Return the study's page."""
    captured = [graph_facts(_recipe(4096, dispatcher), 8)["captured"] for dispatcher in _DISPATCHERS]
    host, gpu = measured["host_us"], gpu_us()
    eager, partly = host["moe"]["eager"], host["moe"][PARTIAL]
    bound = [tokens for tokens, took in gpu.items() if took < eager]
    pace = ["tokens", "GPU us", "eager: slower is", "partial capture: slower is", "faster by"]
    return f"""# Graphs

`python -m tools.study graphs` wrote this page; `--measure` takes its host times anew. A replay launches a run
of a layer at once, where eager code makes op after op. What that saves is the host's time, which matters
where the host is slower than the GPU. Where tokens go to experts on other ranks by all-to-all, the host has
to know how many, so part of a layer stays eager ([cuda-graphs.md](../cuda-graphs.md)); through memory that
ranks share they travel inside the graph ([moe.md](../moe.md)).

## What a layer launches

Ops that make a kernel, counted in a layer's forward and backward; some of fastmp's ops launch two. What is
captured is what `fastmp plan graphs` says of Qwen3-30B-A3B with experts over 8 ranks, without a scope, by
two dispatchers.

{table(["segment", "forward", "backward", *_DISPATCHERS], [*_segment_rows(counts["moe"], captured)])}
A dense layer launches {_total(counts["dense"])}: {_described(counts["dense"])}.

## What capture saves

Of a layer and microbatch, forward and backward. Launches that are left are those of eager segments, and one
for each replay; static inputs that are not in place cost one more. Host times are measured: CPU time at the
smallest shapes on one thread of {measured["cpu"]} (torch {measured["torch"]}), least of 320 microbatches,
while other work ran. Graphs do nothing, so that only the host's work around a replay is left. The small
kernels of the eager parts are in the times, the CUDA driver's calls are not.

{table(["layer", "in graphs", "launches", "left", "host us", "saved"], [*_scope_rows(counts, host)])}
A launch that is removed saves {_per_launch(counts, host):.0f} us of this host. With all experts on one rank
a layer is captured whole, and so it is where ranks share memory; by all-to-all, partial capture still takes
{(eager - partly) / eager:.0%} of the host's time away.

![host time of a layer, eager and in graphs, beside the GPU's time](graphs-host.png)

## Where that matters

Predicted time of a layer of Qwen3-30B-A3B on an H100 (`fastmp plan time`, 8 GPUs, experts over them), by the
tokens of a microbatch, beside the host times above. Where the GPU takes less than the host, the host sets the
pace: with microbatches of {", ".join(f"{tokens:,}" for tokens in bound) or "none of these"} tokens.

{table(pace, [*_pace_rows(gpu, host["moe"])])}
These are estimates, from this host's times and a GPU's data sheet: a faster host or slower kernels move the
border. `gpu_check` measures both on a GPU.
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
