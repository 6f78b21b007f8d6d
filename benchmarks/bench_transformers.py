"""A training step of models of transformers: accelerated, as they are, and with what others have for them.

`python -m benchmarks.bench_transformers [--device cuda] [--out FILE]` prints, for each model and dtype, the
least time of forward and backward that were made in turn in one process, the median of the ratios to eager
within a round, and the peak memory: weights, gradients, and the most that a step holds beside them.

Eager is transformers with its loop over experts, grouped_mm its grouped products, which it takes by itself
where it can. sonicmoe and Liger run on a GPU, where they are installed. Liger's rotary embedding is left out:
it would change every model of the process.
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
from benchmarks.against_transformers import read_options, write_rows
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
            **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 4, "head_dim": 128},
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
            **{"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 4, "intermediate_size": 14336},
            **{"num_attention_heads": 32, "num_key_value_heads": 8},
        },
        (1, 512),
        (2, 4096),
    ),
}


def models_of(case: str, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    """{rival: its model}, all with the same weights."""
    import transformers

    name, on_cpu, on_gpu, *_ = CASES[case]
    config = getattr(transformers, name)(**(on_gpu if device == "cuda" else on_cpu), use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        eager = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation="eager"
        )
    eager.train()
    models = {OURS: copy.deepcopy(eager), EAGER: eager}
    fastmp.accelerate(models[OURS])
    if "num_experts" in on_cpu:
        for implementation in (GROUPED, SONIC) if device == "cuda" else (GROUPED,):
            model = copy.deepcopy(eager)
            try:
                model.set_experts_implementation(implementation)
                step(model, tokens_of(case, device))
                models[implementation] = model
            except Exception as error:  # what is not installed, or not for this GPU, raises whatever it likes
                print(f"{implementation}: {str(error).splitlines()[0]}")
    if (apply := peer(LIGER, LIGER_APPLY, device)) is not None:
        models[LIGER] = copy.deepcopy(eager)
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
    """A row for each rival."""
    models, tokens = models_of(case, dtype, device), tokens_of(case, device)
    calls: dict[str, Callable[[], Any]] = {
        name: partial(step, model, tokens) for name, model in models.items()
    }
    for call in calls.values():
        call()
    clock = event_ms if device == "cuda" else cpu_ms
    times = in_turn({name: partial(clock, call) for name, call in calls.items()}, rounds)
    rows = []
    for name, model in models.items():
        for each in models.values():
            each.zero_grad(set_to_none=True)
        gc.collect()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        peak = 2 * weights + extra_bytes(calls[name], device)  # gradients are as large as the weights
        ratio = statistics.median(a / b for a, b in zip(times[name], times[EAGER], strict=True))
        of = {"case": case, "dtype": name_of(dtype), "by": name}
        rows.append({**of, "ms": min(times[name]), "of eager": ratio, "peak MiB": peak / 2**20})
    peaks = {row["by"]: row["peak MiB"] for row in rows}
    return [{**row, "peak of eager": row["peak MiB"] / peaks[EAGER]} for row in rows]


def main() -> int:
    options = read_options(__doc__.partition("\n")[0])
    rows = []
    print(f"{'':18}{'dtype':10}{'':12}{'ms':>10}{'of eager':>10}{'peak MiB':>10}{'of eager':>10}")
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            for row in measure(case, dtype, options.device, options.rounds):
                print(
                    f"{row['case']:18}{row['dtype']:10}{row['by']:12}{row['ms']:10.1f}{row['of eager']:10.2f}"
                    f"{row['peak MiB']:10.0f}{row['peak of eager']:10.2f}"
                )
                rows.append(row)
    if options.out:
        write_rows(options.out, options.device, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
