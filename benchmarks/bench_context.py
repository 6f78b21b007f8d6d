"""Time of each context-parallel rank's attention beside an equal share of the whole.

`python -m benchmarks.bench_context` prints CPU times, forward and backward. The ranks compute one after the
other in one process, where all keys and values are, so nothing is sent. Ranks with neighbouring slices, which
are not balanced, stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.measure import cpu_ms, in_turn
from fastmp.ops.attention import attend

WORKLOADS = ()
HEADS, DIM, TOKENS = 4, 64, 4096
SIZES = (2, 4, 8)


def make(numbers: Sequence[int], count: int, tokens: int = TOKENS) -> Callable[[], None]:
    """Return the forward and backward of the queries of slices `numbers` out of `count`."""
    generator, size = torch.Generator().manual_seed(0), tokens // count
    q, k, v = (torch.randn(1, HEADS, tokens, DIM, generator=generator, requires_grad=True) for _ in range(3))

    def run() -> None:
        outputs = []
        for number in numbers:
            end = (number + 1) * size
            outputs.append(attend(q[:, :, end - size : end], k[:, :, :end], v[:, :, :end]))
        torch.autograd.grad(torch.cat(outputs, 2).sum(), (q, k, v))

    return run


def of_all_ranks(cp: int, balanced: bool) -> dict[str, Callable[[], None]]:
    """Return what all ranks together compute."""
    kind = "balanced" if balanced else "neighbours"
    pairs = [(r, 2 * cp - 1 - r) if balanced else (2 * r, 2 * r + 1) for r in range(cp)]
    return {f"{kind} {r}": make(pair, 2 * cp) for r, pair in enumerate(pairs)}


def test_rank(benchmark):
    benchmark(make((1, 6), 8, tokens=1024))


def main() -> int:
    torch.set_num_threads(1)
    print(f"causal attention, {TOKENS} tokens, {HEADS} heads of {DIM}, float32, forward + backward: CPU ms")
    heads = {
        "cp": 4,
        "whole / cp": 14,
        "balanced ranks": 24,
        "over whole / cp": 18,
        "neighbouring slices": 24,
    }
    print("".join(f"{head:>{width}}" for head, width in heads.items()))
    for cp in SIZES:
        calls = {"whole": make((0,), 1)} | of_all_ranks(cp, True) | of_all_ranks(cp, False)
        times = in_turn({name: partial(cpu_ms, call) for name, call in calls.items()}, rounds=5)
        least = {name: min(own) for name, own in times.items()}
        share = least.pop("whole") / cp
        kinds = [[ms for name, ms in least.items() if name.startswith(kind)] for kind in ("b", "n")]
        ranges = [f"{min(ms):.0f} to {max(ms):.0f}" for ms in kinds]
        over = f"{100 * (max(kinds[0]) / share - 1):+.0f}%"
        print(f"{cp:>4}{share:>14.0f}{ranges[0]:>24}{over:>18}{ranges[1]:>24}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
