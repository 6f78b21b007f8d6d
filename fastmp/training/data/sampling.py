"""The order of training samples: a pure function of (seed, epoch, position), with no table and no state.

The token stream of T tokens is read as a ring. An epoch has n = T // seq_len samples; sample i starts at
token (phase + i * seq_len) mod T, where `phase` differs from epoch to epoch, and samples are visited in the
order of a keyed permutation of [0, n): a Feistel network over splitmix64, walked until it lands below n. Any
position costs O(1), so a run resumes anywhere from one integer. This module is the definition;
csrc/host/index.cpp serves the same numbers, bit for bit, where it is built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastmp.host import HOST

ROUNDS = 8
_MASK = (1 << 64) - 1


def mix(x: Any) -> Any:
    """Return splitmix64's step and finaliser (Steele, Lea, Flood 2014) of an int or a uint64 array."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the 64-bit key of an epoch: its phase is mix(key), its round keys mix(key + 1 + round)."""
    return mix((mix(seed & _MASK) + epoch) & _MASK)


def permute(positions: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """Return the image of `positions` under permutation `key` of [0, size): same shape, int64."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    round_keys = [mix((key + 1 + r) & _MASK) for r in range(ROUNDS)]

    def network(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> half, x & low
        for round_key in round_keys:
            left, right = right, left ^ (mix(right ^ round_key) >> (64 - half))
        return (left << half) | right  # type: ignore[return-value]  # numpy keeps uint64

    x = network(positions.astype(np.uint64))
    while (outside := x >= size).any():
        x[outside] = network(x[outside])
    return x.astype(np.int64)


def reference_sample_starts(
    seed: int, first: int, count: int, num_tokens: int, seq_len: int
) -> npt.NDArray[np.int64]:
    """Return `sample_starts` computed in numpy, the definition for the C++ version."""
    _check(first, count, num_tokens, seq_len)
    size = num_tokens // seq_len
    samples = np.arange(first, first + count, dtype=np.int64)
    epochs = samples // size
    starts = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        key = epoch_key(seed, epoch)
        phase = mix(key) % num_tokens
        starts[here] = (phase + permute(samples[here] % size, size, key) * seq_len) % num_tokens
    return starts


def sample_starts(seed: int, first: int, count: int, num_tokens: int, seq_len: int) -> npt.NDArray[np.int64]:
    """Return the first tokens (count,) int64 of samples `first` to `first` + `count` - 1 of a run.

    Raises ValueError if the stream does not hold one sample of seq_len + 1 tokens.
    """
    if HOST is None:
        return reference_sample_starts(seed, first, count, num_tokens, seq_len)
    _check(first, count, num_tokens, seq_len)
    return HOST.sample_starts(seed & _MASK, first, count, num_tokens, seq_len)


def first_sample(
    step: int, microbatch: int, num_microbatches: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> int:
    """Return the number of a rank's first sample in a microbatch, counted from the start of the run.

    A step takes num_microbatches * dp_size * micro_batch_size samples; their division over microbatches and
    ranks depends on dp_size, the set does not. Raises ValueError if an argument is out of range.
    """
    if not (0 <= microbatch < num_microbatches and 0 <= dp_rank < dp_size and step >= 0):
        raise ValueError(
            f"TokenDataset.batch: step {step}, microbatch {microbatch} of {num_microbatches}, "
            f"rank {dp_rank} of {dp_size} is out of range"
        )
    return ((step * num_microbatches + microbatch) * dp_size + dp_rank) * micro_batch_size


def _check(first: int, count: int, num_tokens: int, seq_len: int) -> None:
    if first < 0 or count < 0:
        raise ValueError(f"sample_starts: first {first} and count {count} must not be negative")
    if seq_len < 1 or num_tokens < seq_len + 1:
        raise ValueError(
            f"sample_starts: {num_tokens} tokens do not hold one sample of seq_len + 1 = {seq_len + 1}"
        )
