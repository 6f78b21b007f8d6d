"""The benchmark of evaluation: its rivals find the same scores, in bounds that rounding sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import bench_eval
from fastmp.nn import GPT, Placement


@pytest.mark.full
def test_rivals_score_the_same():
    torch.manual_seed(0)
    config = replace(bench_eval.CONFIG, num_layers=1, hidden_size=24, vocab_size=131, max_seq_len=40)
    model = GPT(replace(config, init_std=0.4), Placement(dtype=torch.float64)).eval()
    scores = {name: run() for name, run in bench_eval.runs_of(model).items()}
    assert scores[bench_eval.LAST] == pytest.approx(scores[bench_eval.LOGITS], rel=1e-6)
    assert scores[bench_eval.ALL] > scores[bench_eval.LAST]
