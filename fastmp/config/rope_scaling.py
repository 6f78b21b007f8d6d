"""Scaling of rotary frequencies as options of a model. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastmp.config.options import Checked, Problem, option

__all__ = ["RopeScaling"]

_USED: dict[str, tuple[str, ...]] = {  # by kind, the options that it uses beside `factor`
    "linear": (),
    "dynamic": ("original_max_seq_len",),
    "llama3": ("original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("original_max_seq_len", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        "mscale_all_dim",
    ),
    "longrope": ("original_max_seq_len", "short_factor", "long_factor", "attention_factor"),
}


@dataclass(frozen=True)
class RopeScaling(Checked):
    """Scaling of rotary frequencies, for sequences longer than those of pretraining.

    - "linear" divides all frequencies by `factor`.
    - "dynamic" keeps the frequencies up to `original_max_seq_len` tokens. The base of a longer sequence is
      (1 + `factor` x (length / `original_max_seq_len` - 1))^(D / (D - 2)) times as large, for D rotated
      elements of a head (NTK-aware).
    - "llama3" divides frequencies with fewer than `low_freq_factor` turns in `original_max_seq_len` tokens,
      keeps those with more than `high_freq_factor` turns, and interpolates between (Llama 3.1).
    - "yarn" interpolates by the index of the frequency, from `beta_fast` turns to `beta_slow` turns, and
      multiplies queries and keys by `attention_factor` (Peng et al. 2023, arXiv 2309.00071).
    - "longrope" divides each frequency by a number of its own, from `short_factor` up to
      `original_max_seq_len` tokens and from `long_factor` for longer sequences, and multiplies queries and
      keys by `attention_factor` (Ding et al. 2024, arXiv 2402.13753).

    With "dynamic" and "longrope" the length is that of the sequence, over all context-parallel ranks. Packed
    documents and generation from a cache take the largest position of the batch.
    """

    kind: str = option("llama3", "rule that selects the rotary frequencies to scale", tuple(_USED))
    factor: float = option(
        8.0,
        "divisor of the scaled frequencies; dynamic: growth of the base; longrope: for attention_factor only",
    )
    original_max_seq_len: int = option(8192, "context length of pretraining, in tokens; linear ignores it")
    low_freq_factor: float = option(
        1.0, "llama3: frequencies with fewer rotations over the original context are divided by factor"
    )
    high_freq_factor: float = option(
        4.0, "llama3: frequencies with more rotations over the original context stay unscaled"
    )
    beta_fast: float = option(
        32.0, "yarn: frequencies with more rotations over the original context stay unscaled"
    )
    beta_slow: float = option(
        1.0, "yarn: frequencies with fewer rotations over the original context are divided by factor"
    )
    truncate: bool = option(True, "yarn: round the indices of these two frequencies outwards")
    short_factor: tuple[float, ...] = option(
        (), "longrope: divisor of each frequency in sequences up to original_max_seq_len"
    )
    long_factor: tuple[float, ...] = option((), "longrope: divisor of each frequency in longer sequences")
    attention_factor: float | None = option(
        None,
        "factor on queries and keys [mscale]; unset: 0.1 ln(factor) + 1 with yarn, "
        "sqrt(1 + ln(factor) / ln(original_max_seq_len)) with longrope",
    )
    mscale_all_dim: float = option(
        0.0, "yarn, latent attention: multiply scores by (0.1 x this x ln(factor) + 1)^2; 0: by 1"
    )

    @property
    def used(self) -> dict[str, Any]:
        """The kind and the values that it uses."""
        return {name: getattr(self, name) for name in ("kind", "factor", *_USED[self.kind])}

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the length of the sequence."""
        return self.kind in ("dynamic", "longrope")

    def extends(self, length: int) -> bool:
        """Return True if a sequence of `length` tokens has other frequencies than short ones have."""
        return self.by_length and length > self.original_max_seq_len

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("original_max_seq_len", "low_freq_factor", "beta_slow")
        yield from self._not_positive("attention_factor")
        yield from self._negative("mscale_all_dim")
        if self.factor < 1.0:
            yield self._wrong("factor", "1 or more")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high:
            yield (
                "low_freq_factor high_freq_factor",
                f"low_freq_factor must be less than high_freq_factor, got {low} and {high}",
            )
        if self.beta_slow > self.beta_fast:
            yield (
                "beta_slow beta_fast",
                f"beta_slow must be at most beta_fast, got {self.beta_slow} and {self.beta_fast}",
            )
        yield from self._longrope_problems()

    def _longrope_problems(self) -> Iterator[Problem]:
        short, long = self.short_factor, self.long_factor
        if self.kind != "longrope":
            if short or long:
                yield (
                    "short_factor long_factor kind",
                    f"short_factor and long_factor are of kind 'longrope' only, got {self.kind!r}",
                )
        elif not short or len(short) != len(long):
            yield (
                "short_factor long_factor",
                f"longrope needs as many short_factor as long_factor, got {len(short)} and {len(long)}",
            )
        elif min(*short, *long) <= 0.0:
            yield (
                "short_factor long_factor",
                f"short_factor and long_factor must be positive, got {min(*short, *long)}",
            )
        elif self.original_max_seq_len < 2:
            yield (
                "original_max_seq_len",
                f"longrope needs original_max_seq_len above 1, got {self.original_max_seq_len}",
            )
