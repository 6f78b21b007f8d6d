"""Windows of an evaluation: what it costs to score the last tokens of each, all of them, or from all logits.

`python -m benchmarks.bench_eval [--device cuda]` prints, for a GPT with GPT-2's vocabulary and windows of
1024 tokens, how many tokens a second are scored where every window scores all of its targets; where it scores
32, which is what `python -m examples.megatron_paper evaluate wikitext` does; and where it makes the logits of
the whole window for these 32, as evaluations by a model's logits do. On a CPU one thread works and times are
of the CPU, because other work on the machine only adds to others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.against_transformers import read_options
from benchmarks.measure import cpu_ms, event_ms, in_turn, speedup
from fastmp.apps.evaluation.scoring import ScoredText, Scorer
from fastmp.config import GPTConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement

WORKLOADS = ()  # it stands by itself
CONFIG = GPTConfig(num_layers=6, hidden_size=768, num_heads=12, vocab_size=50_257, max_seq_len=1024)
STRIDE = 32
ALL, LAST, LOGITS = "all targets", f"the last {STRIDE}", f"the last {STRIDE}, all logits"


def runs_of(model: GPT) -> dict[str, Callable[[], float]]:
    """Score one full-length window with each baseline and return -log P of the scored tokens."""
    length, generator = model.config.max_seq_len, torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (length + 1,), generator=generator)
    scorer = Scorer(model, ParallelGroups.alone())

    @torch.no_grad()
    def by_logits() -> float:
        tokens_BS = ids[None, :-1].to(scorer.device)
        logits_SV = model(tokens_BS)[:, 0, : model.config.vocab_size]
        log_probs_SV = logits_SV.float().log_softmax(-1)
        targets = ids[1:].to(scorer.device)
        return -float(log_probs_SV.gather(1, targets[:, None])[-STRIDE:].double().sum())

    def scored(number: int) -> float:
        return -scorer([ScoredText(ids.numpy(), number)])[0].log_prob

    return {ALL: partial(scored, length), LAST: partial(scored, STRIDE), LOGITS: by_logits}


def main() -> int:
    options = read_options(__doc__.partition("\n")[0])
    if options.device == "cpu":
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = GPT(CONFIG, Placement(device=options.device, dtype=dtype)).eval()
    runs = runs_of(model)
    for run in runs.values():
        run()
    clock = event_ms if options.device == "cuda" else cpu_ms
    times = in_turn({name: partial(clock, run) for name, run in runs.items()}, options.rounds)
    print(f"{'a window of 1024 scores':24}{'ms':>9}{'tokens/s':>10}{'ms to the last 32':>19}")
    for name, number in ((ALL, CONFIG.max_seq_len), (LAST, STRIDE), (LOGITS, STRIDE)):
        ms = statistics.median(times[name])
        print(f"{name:24}{ms:9.1f}{number / ms * 1e3:10.1f}{speedup(times[LAST], times[name]):19.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
