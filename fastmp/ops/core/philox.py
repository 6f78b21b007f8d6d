"""Philox-4x32-10, a counter-based random number generator (Salmon et al. 2011).

A call maps a 64-bit key (the seed) and a counter to four 32-bit words. The lower 64 bits of the counter count
calls, the next 32 bits number independent streams. Words depend on nothing else: not on layout, block sizes,
threads, dtype, or backend (plain torch and Triton here, C++ in csrc/cpu/philox.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core._triton import jit, tl

_WORD = 0xFFFFFFFF


def philox(seed: Tensor | int, counter: Tensor, stream: Tensor | int = 0) -> Tensor:
    """Return the words (..., 4), as int64, of int64 counters (...), in plain torch.

    int64 holds all 64 bits of a 32 x 32-bit product, the highest as its sign.

    Example:

        words = philox(seed=1, counter=torch.arange(2))
        assert words.shape == (2, 4) and 0 <= words.min() and words.max() < 2**32
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1 = counter & _WORD, (counter >> 32) & _WORD
    c3 = torch.zeros_like(counter)
    c2 = c3 + (stream & _WORD)
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD
        c2, c3 = ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack((c0, c1, c2, c3), -1)


@jit
def four_words(seed, counter, stream=None):
    """Return the four words of int64 counters, as uint32.

    Both halves of a 32 x 32-bit product come from one instruction here; tl.randint4x, which returns the same
    words, uses two.
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    a = counter.to(tl.uint32).to(tl.uint64) * 0xD2511F53  # first of ten rounds, with c3 = 0
    c0 = (counter >> 32).to(tl.uint32) ^ k0
    c1 = tl.zeros_like(c0)
    if stream is not None:  # c2; 0 without
        b = stream.to(tl.uint32).to(tl.uint64) * 0xCD9E8D57
        c0 ^= (b >> 32).to(tl.uint32)
        c1 += b.to(tl.uint32)
    c2 = (a >> 32).to(tl.uint32) ^ k1
    c3 = a.to(tl.uint32)
    for _ in tl.static_range(9):
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
    return c0, c1, c2, c3


@jit
def word_of(seed, index, stream=None):
    """Return word index % 4 of counter index // 4, for int64 indices.

    Four neighbours cost four times the work of `four_words`, but may start at any index.
    """
    a0, a1, a2, a3 = four_words(seed, index >> 2, stream)
    low = tl.where(index & 1 == 0, a0, a1)
    return tl.where(index & 2 == 0, low, tl.where(index & 1 == 0, a2, a3))
