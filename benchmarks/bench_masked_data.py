"""The CPU time of a masked sample, and its share of a training step on a GPU that ran at its peak.

`python -m benchmarks.bench_masked_data` reads Python's own documentation. A share is of the least time that
forward and backward of BERT with 336 M parameters can take on one H100, by its data sheet: a real step takes
longer, and the share is smaller.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence

from fastmp.config import BertConfig, DataConfig, GPTConfig, MaskedLMConfig
from fastmp.config.sizes import flops_per_token
from fastmp.training.data.masked import MaskedDataset
from fastmp.training.metrics import PEAK_FLOPS

WORKLOADS = ()
CASES = (("bpe", 512, 32), ("bpe", 512, 4), ("bpe", 128, 64), ("byte", 512, 32))  # tokenizer, S, B
BERT = GPTConfig(
    num_layers=24, hidden_size=1024, num_heads=16, vocab_size=30_522, max_seq_len=512, bert=BertConfig()
)


def microbatch_seconds(data: MaskedDataset, rounds: int) -> float:
    """The least CPU time of a microbatch."""
    times = []
    for step in range(rounds):
        began = time.process_time()
        data.batch(step, 0, 1, 0, 1)
        times.append(time.process_time() - began)
    return min(times)


def table(cache_dir: str, rounds: int) -> Iterator[str]:
    yield f"{'tokenizer':>10}{'tokens':>8}{'samples':>9}{'us/sample':>11}{'samples/s':>11}{'share':>8}"
    for tokenizer, seq_len, size in CASES:
        config = DataConfig(
            tokenizer=tokenizer, seq_len=seq_len, micro_batch_size=size, masked_lm=MaskedLMConfig()
        )
        data = MaskedDataset.from_config(config, cache_dir=cache_dir)
        seconds = microbatch_seconds(data, rounds) / size
        least = seq_len * flops_per_token(BERT, seq_len) / PEAK_FLOPS["H100"]
        yield (
            f"{tokenizer:>10}{seq_len:>8}{size:>9}{seconds * 1e6:>11.0f}{1 / seconds:>11,.0f}"
            f"{seconds / least:>8.0%}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_masked_data", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="microbatches of each shape (300)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache_dir:
        print("\n".join(table(cache_dir, options.rounds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
