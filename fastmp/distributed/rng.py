"""Random streams of a rank: one equal across tensor-parallel ranks, one different on each.

| stream | differs across | draws |
|---|---|---|
| "default" | pp | residual dropout, replicated weights |
| "tensor-parallel" | tp, pp | dropout of a rank's heads, sharded weights |
| "context-parallel" | cp, pp | as "default", for tokens sharded over context-parallel ranks |
| "tensor-context-parallel" | tp, cp, pp | as "tensor-parallel", for sharded tokens |

Equal masks or weights on different shards would be wrong without an error. Data-parallel ranks have equal
streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

__all__ = ["RngTracker", "Seeds", "seeded"]

_TENSOR_PARALLEL_OFFSET = 2718  # seeds of the streams: the ones Megatron-LM uses
_STAGE_OFFSET = 100
_CONTEXT_OFFSET = 1_000_000


class Seeds:
    """Seeds drawn by `RngTracker.seed` in a recomputed region, read again by the recomputation.

    Attributes:
        states: of the streams at the start of the recomputation. Seeds of other streams are kept.
        drawn: seeds of each stream, in order.
        advanced: generator offset by which the draws moved each stream on, if it was observed.
    """

    def __init__(self, states: Mapping[str, torch.Tensor | torch.Generator]) -> None:
        self.states = states
        self.drawn: dict[str, list[torch.Tensor]] = {}
        self.advanced: dict[str, int] = {}

    def add(self, stream: str, seed: torch.Tensor, advance: int) -> None:
        if stream not in self.states:
            self.drawn.setdefault(stream, []).append(seed)
        self.advanced[stream] = self.advanced.get(stream, 0) + advance


class RngTracker:
    """Random streams of this rank; `current` is the stream that torch draws from.

    The constructor seeds torch's generators: "default", the default generator of `device`, with
    `seed + 100 * pp_rank`, and "tensor-parallel" with `seed + 2718 + tp_rank + 100 * pp_rank`. With a
    `cp_rank`, "context-parallel" and "tensor-context-parallel" are seeded 1,000,000 * (1 + cp_rank) above
    these two. The default generators of other devices get the default seed.

    Example:
        >>> rng = RngTracker(1234, tp_rank=0)
        >>> with rng.fork("tensor-parallel"):
        ...     weight = torch.randn(4, 4)
    """

    def __init__(
        self,
        seed: int,
        *,
        tp_rank: int = 0,
        cp_rank: int | None = None,
        pp_rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        stage_seed = seed + _STAGE_OFFSET * pp_rank
        torch.manual_seed(stage_seed)
        self._default = _default_generator(self.device)
        sharded_seed = stage_seed + _TENSOR_PARALLEL_OFFSET + tp_rank
        seeds = {"default": stage_seed, "tensor-parallel": sharded_seed}
        if cp_rank is not None:
            offset = _CONTEXT_OFFSET * (1 + cp_rank)
            seeds["context-parallel"] = stage_seed + offset
            seeds["tensor-context-parallel"] = sharded_seed + offset
        self._seeds = seeds
        self._streams = {
            name: torch.Generator(self._default.device).manual_seed(number)
            for name, number in seeds.items()
            if name != "default"
        }
        self.current = "default"
        self._keeper: Callable[[], Mapping[str, torch.Generator] | None] | None = None
        self._ended: Callable[[Seeds], None] | None = None
        self._outside: Callable[[], Mapping[str, torch.Generator] | None] | None = None
        self._noted: list[Seeds] = []  # of the running regions, each nested in the one before
        self._repeated: dict[str, Iterator[torch.Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> RngTracker:
        return self  # a copied model draws from the same streams: there is one default generator

    @contextmanager
    def fork(self, name: str = "tensor-parallel", *, device: torch.device | None = None) -> Iterator[None]:
        """Draw from stream `name` inside the block; the next block of this stream continues where it ended.

        A block inside a block of the same stream changes nothing.

        Args:
            device: on which the block draws.

        Raises:
            ValueError: the stream is unknown, or `device` is not the tracker's: all ranks would draw equal
                numbers there.
        """
        if name not in self._streams:
            hint = "; make the tracker with cp_rank=" if "context" in name else ""
            known = ", ".join(self._streams)
            raise ValueError(f"RngTracker.fork: no stream {name!r}; there is {known}{hint}")
        if device is not None and device.type != "meta" and device != self._default.device:
            raise ValueError(
                f"RngTracker.fork: the tracker draws on {self._default.device}, not on {device}; make it "
                f"with device={str(device)!r}"
            )
        if name == self.current:
            yield
            return
        outer = self.current
        self._swap(name)
        self.current = name
        try:
            yield
        finally:
            self._swap(name)
            self.current = outer

    def _swap(self, name: str) -> None:
        """Exchange the default generator's state with that of stream `name`."""
        own = self._streams[name]
        if self._default.device.type == "cuda":  # by reference: no copy, and legal inside a captured graph
            before = self._default.graphsafe_get_state()
            self._default.graphsafe_set_state(own)
            self._streams[name] = before
        else:
            state = self._default.get_state()
            self._default.set_state(own.get_state())
            own.set_state(state)

    def seed(self, device: torch.device) -> torch.Tensor:
        """Draw an int64 seed () from the current stream, on `device`; a mask is then a pure function of it.

        In a captured recomputation (see `again`), return the seed of the forward.
        """
        if self.current not in self._repeated:
            number, advance = self._draw(device)
        else:
            kept, advance = next(self._repeated[self.current], None), 0
            if kept is None:
                raise RuntimeError(
                    f"RngTracker.seed: a recomputation draws more seeds of stream {self.current!r} than the "
                    "forward; a function that is recomputed must do the same both times"
                )
            number = kept
        for seeds in self._noted:
            seeds.add(self.current, number, advance)
        return number

    def _draw(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return a seed of the current stream, and the offset by which it moved (0 if nobody observes)."""
        before = 0 if self._ended is None else self._default.get_offset()
        number = torch.randint(-(1 << 63), (1 << 63) - 1, (), device=device)
        return number, 0 if self._ended is None else self._default.get_offset() - before

    @contextmanager
    def noting(self, seeds: Seeds) -> Iterator[None]:
        """Record in `seeds` all draws of `seed` inside the block, a region to be recomputed."""
        self._noted.append(seeds)
        try:
            yield
        finally:
            self._noted.remove(seeds)
        if self._ended is not None:
            self._ended(seeds)

    @contextmanager
    def again(self, seeds: Seeds) -> Iterator[None]:
        """Start the streams from `seeds.states` inside the block, and restore them after it.

        From a stream without a state the block may only draw seeds, and gets those of `seeds`.
        """
        outside, repeated = self._states(self._outside), self._repeated
        self.restore({**outside, **seeds.states})
        self._repeated = {
            name: iter(seeds.drawn.get(name, ())) for name in outside if name not in seeds.states
        }
        try:
            yield
        finally:
            self._repeated = repeated
            self.restore(outside)

    def states(self) -> Mapping[str, torch.Tensor | torch.Generator]:
        """Return the state of every stream, as uint8 tensors on the CPU, for a recomputation or a checkpoint.

        The states differ across tensor-parallel ranks.
        """
        return self._states(self._keeper)

    def _states(
        self, keeper: Callable[[], Mapping[str, torch.Generator] | None] | None
    ) -> Mapping[str, torch.Tensor | torch.Generator]:
        if keeper is not None and (kept := keeper()) is not None:
            return kept
        return {name: generator.get_state() for name, generator in self._by_name().items()}

    def restore(self, states: Mapping[str, torch.Tensor | torch.Generator]) -> None:
        """Set every stream to its entry in `states`.

        An entry is a tensor from `states()`, or on CUDA a generator from `generators()`, which takes the
        stream's place.

        Raises:
            ValueError: `states` has other streams than this tracker, or a generator on a CPU.
        """
        streams = self._by_name()
        if set(states) != set(streams):
            raise ValueError(f"RngTracker.restore: got streams {sorted(states)}, expected {sorted(streams)}")
        for name, state in states.items():
            if isinstance(state, torch.Tensor):
                streams[name].set_state(state.cpu())
            elif self._default.device.type == "cpu":
                raise ValueError(
                    f"RngTracker.restore: the streams of cpu take states, got a generator for {name!r}"
                )
            elif name == self.current:
                self._default.graphsafe_set_state(state)
            else:
                self._streams[self.current if name == "default" else name] = state

    def follow(self, other: RngTracker) -> None:
        """Continue as `other`, a tracker with the same streams."""
        self.restore(other.states())
        self._seeds = other._seeds

    def restart(self, step: int) -> None:
        """Seed every stream again from its first seed and `step`, whose state is not known."""
        numbers = {
            name: int.from_bytes(blake2b(f"{seed} {step}".encode(), digest_size=7).digest(), "little")
            for name, seed in self._seeds.items()
        }
        torch.manual_seed(numbers["default"])
        for name, generator in self._by_name().items():
            generator.manual_seed(numbers[name])

    def _by_name(self) -> dict[str, torch.Generator]:
        streams = {"default": self._default, **self._streams}
        if self.current != "default":  # inside a fork the two generators hold each other's stream
            streams["default"], streams[self.current] = streams[self.current], streams["default"]
        return streams

    def generators(self) -> dict[str, torch.Generator]:
        """Return a generator for each stream of a CUDA device, which moves on with the stream.

        A graph registers them; during capture, when states cannot be read, `restore` takes them.

        Raises:
            ValueError: the device is a CPU, whose streams take turns in one generator by copies of states.
        """
        if self._default.device.type == "cpu":
            raise ValueError("RngTracker.generators: the streams of cpu have states only; use states()")
        streams = self._by_name()
        streams[self.current] = self._default.graphsafe_get_state()
        return streams

    @contextmanager
    def kept_by(
        self,
        keeper: Callable[[], Mapping[str, torch.Generator] | None],
        ended: Callable[[Seeds], None] | None = None,
        again: Callable[[], Mapping[str, torch.Generator] | None] | None = None,
    ) -> Iterator[None]:
        """Let `states()` return the result of `keeper()` inside the block, unless that is None.

        Args:
            ended: called with the seeds of each region to be recomputed, after its forward.
            again: in place of `keeper` for the states restored after a recomputation; None: `keeper`.
        """
        before = self._keeper, self._ended, self._outside
        self._keeper, self._ended, self._outside = keeper, ended, keeper if again is None else again
        try:
            yield
        finally:
            self._keeper, self._ended, self._outside = before


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generator of `device` inside the block, and restore it after the block."""
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    raise ValueError(f"RngTracker: no generator for device {device}; use cpu or cuda")
