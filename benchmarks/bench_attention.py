"""Backends of attention beside a mask of all pairs: the last tokens of a sequence, windows, packed documents.

`python -m benchmarks.bench_attention [--device cuda]` prints, for forward and backward together, the least
time of calls that were made in turn, and the most memory that one allocates beyond its inputs. "whole" is the
time of the same tokens without window or documents: each sees all before it. "room for 64" has the borders of
documents in a tensor of fixed size, as graphs need, which on a CPU is a mask.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import cpu_ms, event_ms, extra_bytes, in_turn
from fastmp.ops.attention import Borders, attend, choose, describe

WORKLOADS = ()
HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 64, 4096
CASES = {
    "last 1024 of 4096": {"queries": 1024},
    "last 512 of 3584": {"queries": 512, "keys": 3584},
    "window 256": {"window": 256},
    "window 1024": {"window": 1024},
    "8 documents": {"lengths": [512] * 8},
    "8, room for 64": {"lengths": [512] * 8, "room": 64},
    "40 documents": {"lengths": [16, 100, 188, 90, 118] * 8},
    "256 documents": {"lengths": [16] * 256},
}


def make(
    device: str,
    queries: int = TOKENS,
    keys: int = TOKENS,
    window: int | None = None,
    lengths: list[int] | None = None,
    room: int = 0,
) -> tuple[str, list[Callable[[], object]]]:
    """Return the backend's name, our forward and backward, those of a call with a mask, and of all before."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, tokens, heads, DIM, device=device, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for tokens, heads in ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    )
    grad = torch.ones_like(q)
    documents = None
    if lengths is not None:
        ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        longest = max(lengths)
        if room:
            ends = F.pad(ends, (0, room - len(lengths)), value=keys)
            longest = keys
        documents = Borders(ends, ends, longest, longest, static=room > 0)

    def mask() -> Tensor:
        """Made in every call, as a layer would."""
        query = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
        key = torch.arange(keys, device=device)
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        if documents is not None:
            number = torch.searchsorted(documents.queries[1:], key, right=True)
            seen &= number == number.unsqueeze(1)
        return seen

    def ours() -> object:
        return torch.autograd.grad(attend(q, k, v, window=window, documents=documents), (q, k, v), grad)

    def masked() -> object:
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(), enable_gqa=True)
        return torch.autograd.grad(output, (q, k, v), grad)

    def whole() -> object:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    asked = {"window": window is not None, "documents": documents is not None, "readable": not room}
    backend = choose(describe(q, k, v, **asked)).backend
    return backend, [ours, masked] if window is documents is None else [ours, masked, whole]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    clock = event_ms if device == "cuda" else cpu_ms
    torch.set_num_threads(1)
    kind = "bfloat16, GPU" if device == "cuda" else "float32, CPU"
    print(f"{TOKENS} tokens, {HEADS} heads over {KV_HEADS} of {DIM}, {kind} ms, forward + backward")
    print(f"{'':20}{'backend':>12}{'ms':>10}{'mask ms':>10}{'whole ms':>10}{'MiB':>8}{'mask MiB':>10}")
    for name, options in CASES.items():
        backend, calls = make(device, **options)
        times = in_turn({str(i): partial(clock, call) for i, call in enumerate(calls)}, rounds=5)
        least = [min(own) for own in times.values()]
        gc.collect()
        extra = [extra_bytes(call, device) / 2**20 for call in calls[:2]]
        whole = f"{least[2]:10.1f}" if len(least) > 2 else f"{'':10}"
        print(f"{name:20}{backend:>12}{least[0]:10.1f}{least[1]:10.1f}{whole}{extra[0]:8.1f}{extra[1]:10.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
