"""A training step of LoRA on attention and experts: PEFT over an accelerated model, and over transformers'.

`python -m benchmarks.bench_lora [--device cuda] [--out FILE]` prints the least time of forward and backward,
made in turn in one process, and the most memory that a step holds beside weights and adapters. PEFT merges
the weights of all experts in every forward; experts of an accelerated model take `fastmp.ops.grouped_lora`.
"""

from __future__ import annotations

import copy
import gc
import statistics
from functools import partial
from typing import Any

import torch
from torch import nn

import fastmp
from benchmarks.against_transformers import read_options, write_rows
from benchmarks.bench_transformers import CASES, EAGER, GROUPED, OURS, step, tokens_of
from benchmarks.measure import cpu_ms, event_ms, extra_bytes, in_turn, name_of

WORKLOADS = ()  # it stands by itself
CASE = "Qwen3-MoE"
ADAPTER: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def models_of(case: str, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    """{rival: its model with LoRA}, all with the same weights and adapters."""
    import peft
    import transformers

    name, on_cpu, on_gpu, *_ = CASES[case]
    config = getattr(transformers, name)(**(on_gpu if device == "cuda" else on_cpu), use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        plain = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation=EAGER
        ).train()
    models = {}
    for rival in (OURS, EAGER, GROUPED):
        model = copy.deepcopy(plain)
        if rival == OURS:
            fastmp.accelerate(model)
        else:
            model.set_experts_implementation(rival)
        torch.manual_seed(1)
        models[rival] = peft.get_peft_model(model, peft.LoraConfig(**ADAPTER))
        with torch.no_grad():
            for parameter in models[rival].parameters():
                if parameter.requires_grad:  # B starts with zeros, without gradients for A
                    parameter.normal_(std=0.02)
    return models


def measure(case: str, dtype: torch.dtype, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each rival."""
    models, tokens = models_of(case, dtype, device), tokens_of(case, device)
    calls = {name: partial(step, model, tokens) for name, model in models.items()}
    for call in calls.values():
        call()
    clock = event_ms if device == "cuda" else cpu_ms
    times = in_turn({name: partial(clock, call) for name, call in calls.items()}, rounds)
    rows = []
    for name, model in models.items():
        model.zero_grad(set_to_none=True)
        gc.collect()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        ratio = statistics.median(a / b for a, b in zip(times[name], times[GROUPED], strict=True))
        of = {
            "case": f"{case} with LoRA",
            "dtype": name_of(dtype),
            "by": name,
            "weights MiB": weights / 2**20,
        }
        rows.append(
            {
                **of,
                "ms": min(times[name]),
                "of grouped_mm": ratio,
                "step MiB": extra_bytes(calls[name], device) / 2**20,
            }
        )
    return rows


def main() -> int:
    options = read_options(__doc__.partition("\n")[0])
    rows = []
    print(f"{'':12}{'dtype':10}{'ms':>10}{'of grouped_mm':>15}{'step MiB':>10}{'weights MiB':>13}")
    for dtype in (torch.float32, torch.bfloat16):
        for row in measure(CASE, dtype, options.device, options.rounds):
            print(
                f"{row['by']:12}{row['dtype']:10}{row['ms']:10.1f}{row['of grouped_mm']:15.2f}"
                f"{row['step MiB']:10.0f}{row['weights MiB']:13.0f}"
            )
            rows.append(row)
    if options.out:
        write_rows(options.out, options.device, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
