"""A training step of models of transformers: accelerated, as they are, and with what others have for them.

`python -m benchmarks.bench_transformers [--device cuda] [--out FILE]` prints, for each model and dtype, the
least time of forward and backward that were made in turn in one process, its tokens/s, the median of the
ratios to eager within a round, and the peak memory: weights, gradients, and the most that a step holds beside
them. FILE is written after each case; a later call makes the cases that it does not hold. On a GPU the models
are Llama-3 8B and Qwen3-30B-A3B with eight layers, in bfloat16.

Eager is transformers with its loop over experts, grouped_mm its grouped products, which it takes by itself
where it can. On a GPU these are compiled as well, and sonicmoe and Liger are rivals where they are installed.
Liger's rotary embedding is left out: it would change every model of the process. All share their weights.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fastmp
from benchmarks.against_transformers import read_options, rows_of, write_rows
from benchmarks.cases import COMPILE
from benchmarks.correct import message
from benchmarks.measure import cpu_ms, event_ms, extra_bytes, in_turn, name_of
from benchmarks.peers import LIGER, peer, why_absent

WORKLOADS = ()  # it stands by itself
OURS, EAGER, GROUPED, SONIC = "fastmp", "eager", "grouped_mm", "sonicmoe"
LIGER_APPLY = "liger_kernel.transformers.monkey_patch:_apply_liger_kernel_to_instance"
# {case: (class of the configuration, options on a CPU, options on a GPU, tokens (B, S) of both)}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, int], tuple[int, int]]] = {
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {
            **{"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 2, "head_dim": 64},
            **{"num_attention_heads": 8, "num_key_value_heads": 2, "moe_intermediate_size": 256},
            **{"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True},
        },
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 8, "head_dim": 128},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        },
        (2, 256),
        (2, 4096),
    ),
    "Llama, 128k ids": (
        "LlamaConfig",
        {
            **{"vocab_size": 128256, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 896},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
        },
        {
            **{
                "vocab_size": 128256,
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "intermediate_size": 14336,
            },
            **{"num_attention_heads": 32, "num_key_value_heads": 8},
        },
        (1, 512),
        (1, 4096),
    ),
}
COMPILED_ON = ("cuda",)


def models_of(case: str, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    """{rival: its model}, all of the same parameters; their gradients take the memory of one."""
    import transformers

    name, on_cpu, on_gpu, *_ = CASES[case]
    config = getattr(transformers, name)(**(on_gpu if device == "cuda" else on_cpu), use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        eager = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation="eager"
        )
    eager.train()

    def another() -> nn.Module:
        return copy.deepcopy(eager, {id(parameter): parameter for parameter in eager.parameters()})

    models = {OURS: another(), EAGER: eager}
    fastmp.accelerate(models[OURS])
    to_compile = another()
    if "num_experts" in on_cpu:
        to_compile.set_experts_implementation(GROUPED)
        for implementation in (GROUPED, SONIC) if device == "cuda" else (GROUPED,):
            models[implementation] = another()
            try:
                models[implementation].set_experts_implementation(implementation)
            except Exception as error:  # what is not installed raises whatever it likes
                del models[implementation]
                print(f"{implementation}: {message(error)}")
    if device in COMPILED_ON:
        models[COMPILE] = torch.compile(to_compile)
    if (apply := peer(LIGER, LIGER_APPLY, device)) is not None:
        models[LIGER] = another()
        apply(models[LIGER], rope=False)  # last: it also changes transformers' file of the family
    else:
        print(why_absent(LIGER))
    return models


def tokens_of(case: str, device: str) -> torch.Tensor:
    shape = CASES[case][4 if device == "cuda" else 3]
    vocab = CASES[case][1]["vocab_size"]
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1)).to(device)


def step(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Forward and backward; returns the gradients, which replace those of the step before."""
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def measure(case: str, dtype: torch.dtype, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each rival; one that raises has the reason in place of figures."""
    models, tokens = models_of(case, dtype, device), tokens_of(case, device)
    of = {"case": case, "dtype": name_of(dtype)}
    calls: dict[str, Callable[[], Any]] = {}
    rows: list[dict[str, Any]] = []
    for name, model in models.items():
        call = partial(step, model, tokens)
        try:
            call()
            calls[name] = call
        except Exception as error:  # out of memory, not for this GPU, or what cannot be compiled
            rows.append({**of, "by": name, "raised": message(error)})
    clock = event_ms if device == "cuda" else cpu_ms
    times = in_turn({name: partial(clock, call) for name, call in calls.items()}, rounds)
    weights = sum(p.numel() * p.element_size() for p in models[EAGER].parameters())
    peaks = {}
    for name in calls:
        models[EAGER].zero_grad(set_to_none=True)
        gc.collect()
        peaks[name] = 2 * weights + extra_bytes(calls[name], device)  # gradients are as large as the weights
    for name, own in times.items():
        row: dict[str, Any] = {**of, "by": name, "ms": min(own), "tokens/s": tokens.numel() / min(own) * 1e3}
        row["peak MiB"] = peaks[name] / 2**20
        if EAGER in times:  # which may not fit
            row["of eager"] = statistics.median(a / b for a, b in zip(own, times[EAGER], strict=True))
            row["peak of eager"] = peaks[name] / peaks[EAGER]
        rows.append(row)
    return rows


def main() -> int:
    options = read_options(__doc__.partition("\n")[0])
    rows = rows_of(options.out)
    columns = ("ms", "tokens/s", "of eager", "peak MiB", "of eager")
    print(f"{'':18}{'dtype':10}{'':14}" + "".join(f"{column:>10}" for column in columns))
    for case in CASES:
        for dtype in (torch.bfloat16,) if options.device == "cuda" else (torch.float32, torch.bfloat16):
            if any((row["case"], row["dtype"]) == (case, name_of(dtype)) for row in rows):
                continue
            made = measure(case, dtype, options.device, options.rounds)
            print("\n".join(map(line, made)), flush=True)
            rows += made
            if options.out:
                write_rows(options.out, options.device, rows)
            gc.collect()
    return 0


def line(row: dict[str, Any]) -> str:
    name = f"{row['case']:18}{row['dtype']:10}{row['by']:14}"
    if "raised" in row:
        return f"{name}  {row['raised']}"
    ratios = [f"{row[key]:10.2f}" if key in row else f"{'':10}" for key in ("of eager", "peak of eager")]
    return f"{name}{row['ms']:10.1f}{row['tokens/s']:10.0f}{ratios[0]}{row['peak MiB']:10.0f}{ratios[1]}"


if __name__ == "__main__":
    raise SystemExit(main())
