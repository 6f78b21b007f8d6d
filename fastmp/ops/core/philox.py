"""Philox-4x32-10, random words that are computed from a key and a counter (Salmon et al. 2011).

A call makes four 32-bit words of a key of 64 bits (the seed) and a counter, whose lower 64 bits count calls
and whose next 32 bits may number independent streams. What is made of them depends neither on layout, block
sizes, threads, dtype nor on who serves an op: plain torch, Triton (both here) or C++ (csrc/cpu/philox.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops.core._triton import jit, tl

_WORD = 0xFFFFFFFF


def philox(seed: Tensor | int, counter: Tensor, stream: Tensor | int = 0) -> Tensor:
    """Return (..., 4) words in int64 for int64 counters (...), in plain torch.

    Of a product of two 32-bit numbers int64 keeps all 64 bits, the topmost as its sign.
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
    """Return the words of int64 counters, as uint32. A 32x32-bit product is one instruction if both halves
    come from it: tl.randint4x, which has the same words, takes two."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    a = counter.to(tl.uint32).to(tl.uint64) * 0xD2511F53  # first round, where c3 is 0
    c0 = (counter >> 32).to(tl.uint32) ^ k0
    c1 = tl.zeros_like(c0)
    if stream is not None:  # it is c2, else 0
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
    """Return word index % 4 of counter index // 4, for int64 indices. For four neighbours that is four times
    the work of `four_words`; they may begin anywhere."""
    a0, a1, a2, a3 = four_words(seed, index >> 2, stream)
    low = tl.where(index & 1 == 0, a0, a1)
    return tl.where(index & 2 == 0, low, tl.where(index & 1 == 0, a2, a3))
