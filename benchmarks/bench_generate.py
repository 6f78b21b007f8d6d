"""Text from models of transformers: by fastmp, and by transformers' `generate` with both of its caches.

`python -m benchmarks.bench_generate [--device cuda] [--out FILE]` prints, for each model, dtype and number of
rows, how many tokens a second of a prompt go through the model, how many it then makes, and the median of the
ratios to transformers within a round. All have the same weights, choose greedily, and make the same tokens.

A step of decoding reads every weight that its rows need once, and the keys and values of all of them: the
floor is these bytes over the bandwidth of reading, which is measured in the same process. On a CPU one thread
works and times are of the CPU, because other work on the machine only adds to others.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.against_transformers import read_options, write_rows
from benchmarks.measure import cpu_ms, event_ms, in_turn, name_of
from fastmp.apps.generation.batched import generate
from fastmp.apps.generation.trained_models import load_model, open_weights
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT

WORKLOADS = ()  # it stands by itself
OURS, DYNAMIC, STATIC = "fastmp", "dynamic cache", "static cache"
PROMPT, NEW = 128, 33  # tokens: one of the prefill, and as many steps as there are more
ROWS = (1, 8)
# {case: (class of the configuration, options on a CPU, options on a GPU)}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", {"n_layer": 6, "n_embd": 768, "n_head": 12, "vocab_size": 16384}, {}),
    "Llama": (
        "LlamaConfig",
        {
            **{"vocab_size": 16384, "hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 2816},
            **{"num_attention_heads": 16, "num_key_value_heads": 4},
        },
        {
            **{"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32},
            **{"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
        },
    ),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {
            **{"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 4, "head_dim": 64},
            **{"num_attention_heads": 8, "num_key_value_heads": 2, "moe_intermediate_size": 256},
            **{"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True},
        },
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "head_dim": 128},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        },
    ),
}


def models_of(case: str, dtype: torch.dtype, device: str) -> tuple[Any, GPT]:
    """The model of transformers, and fastmp's of its weights."""
    import transformers

    name, on_cpu, on_gpu = CASES[case]
    options = on_gpu if device == "cuda" else on_cpu
    positions = {"n_positions" if name == "GPT2Config" else "max_position_embeddings": 1024}
    config = getattr(transformers, name)(**options, **positions, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    theirs.generation_config.eos_token_id = None  # nothing ends a text early
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        reader, own = open_weights(None, directory, None)
        ours = load_model(reader, own, ParallelGroups.alone(), device=device, dtype=dtype)
    return theirs, ours


def runs_of(theirs: Any, ours: GPT, rows: int, device: str) -> dict[str, Callable[[int], list[list[int]]]]:
    """{rival: a function that makes so many tokens}."""
    prompts = torch.randint(1, 1000, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    ids, given = prompts.to(device), prompts.tolist()
    attended = torch.ones_like(ids)

    def own(new: int) -> list[list[int]]:
        generated = generate(ours, given, max_new_tokens=new, temperature=0.0)
        return [row.ids for row in generated.rows]

    def other(cache: str, new: int) -> list[list[int]]:
        options = {"do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
        if cache == "static" and device == "cpu":
            options["disable_compile"] = True  # as it does by itself on a CPU
        made = theirs.generate(ids, attention_mask=attended, max_new_tokens=new, **options)
        return made[:, PROMPT:].tolist()

    return {OURS: own, DYNAMIC: partial(other, "dynamic"), STATIC: partial(other, "static")}


def bytes_of_a_step(model: GPT, rows: int) -> int:
    """Bytes that a decode step in the middle of the text reads: weights, keys and values.

    Of experts those that are chosen, if rows choose as differently as they can; of a table of words the rows
    of the tokens, unless the output shares it.
    """
    config, total = model.config, 0
    for name, weight in model.named_parameters():
        share = 1.0
        if "experts.fc" in name and config.moe is not None:
            share = min(1.0, rows * config.moe.top_k / config.moe.num_experts)
        elif name.startswith(("word_embedding", "position_embedding")) and weight is not model.output_weight:
            share = rows / len(weight)
        total += int(share * weight.nbytes)
    itemsize = model.output_weight.element_size()
    heads = 2 * config.num_layers * config.kv_heads * config.head_dim
    return total + rows * (PROMPT + NEW // 2) * heads * itemsize


def read_bandwidth(device: str, clock: Callable[[Callable[[], Any]], float]) -> float:
    """Bytes a second of a sum over a large tensor, the best of several."""
    large = torch.ones(1 << 26, device=device)
    return large.nbytes / (min(clock(large.sum) for _ in range(9)) * 1e-3)


def measure(case: str, dtype: torch.dtype, rows: int, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each rival. RuntimeError where they make other tokens in float32."""
    theirs, ours = models_of(case, dtype, device)
    clock = event_ms if device == "cuda" else cpu_ms
    runs = runs_of(theirs, ours, rows, device)
    made = {name: run(NEW) for name, run in runs.items()}
    if dtype == torch.float32 and any(each != made[OURS] for each in made.values()):
        raise RuntimeError(f"{case}: rivals make other tokens: { {k: v[0][:8] for k, v in made.items()} }")
    calls: dict[str, Callable[[], float]] = {}
    for name, run in runs.items():
        calls[f"{name}, 1"] = partial(clock, partial(run, 1))
        calls[f"{name}, {NEW}"] = partial(clock, partial(run, NEW))
    times = in_turn(calls, rounds)
    floor = bytes_of_a_step(ours, rows) / read_bandwidth(device, clock)
    found = []
    prefill = {name: times[f"{name}, 1"] for name in runs}
    decode = {
        name: [max(b - a, 1e-6) for a, b in zip(times[f"{name}, 1"], times[f"{name}, {NEW}"], strict=True)]
        for name in runs
    }
    for name in runs:
        row: dict[str, Any] = {"case": case, "dtype": name_of(dtype), "rows": rows, "by": name}
        for what, tokens, of in (("prefill", rows * PROMPT, prefill), ("decode", rows * (NEW - 1), decode)):
            row[f"{what} tokens/s"] = tokens / statistics.median(of[name]) * 1e3
            row[f"{what} to dynamic"] = statistics.median(
                b / a for a, b in zip(of[name], of[DYNAMIC], strict=True)
            )
        row["of floor"] = floor * (NEW - 1) * 1e3 / statistics.median(decode[name])
        found.append(row)
    return found


def main() -> int:
    options = read_options(__doc__.partition("\n")[0])
    if options.device == "cpu":
        torch.set_num_threads(1)
    print(f"{'':11}{'dtype':10}{'rows':>4}  {'':14}{'prefill/s':>10}{'ratio':>7}{'decode/s':>10}{'ratio':>7}"
          f"{'of floor':>10}")  # fmt: skip
    rows = []
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            for number in ROWS:
                for row in measure(case, dtype, number, options.device, options.rounds):
                    print(
                        f"{row['case']:11}{row['dtype']:10}{row['rows']:4}  {row['by']:14}"
                        f"{row['prefill tokens/s']:10.0f}{row['prefill to dynamic']:7.2f}"
                        f"{row['decode tokens/s']:10.1f}{row['decode to dynamic']:7.2f}"
                        f"{row['of floor']:10.2f}",
                        flush=True,
                    )
                    rows.append(row)
    if options.out:
        write_rows(options.out, options.device, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
