"""The log of a run: a line every few steps, and the records of runs/NAME/metrics.jsonl.

metrics.jsonl has one JSON object a line; a number that is not finite is null. Every record has "kind" and
"step" (the optimizer steps done). "run" opens it at each start: schema (1), total_steps, tokens_per_step,
flops_per_token, bytes_per_token, device, world_size, ep, expert_stages, mtp_depth. "train": loss,
loss_per_byte, grad_norm, lr, tokens_per_second, flops_per_second, mfu, memory_bytes, eta_seconds,
elapsed_seconds, and with multi-token prediction mtp_loss (weighted, not part of loss). "eval": loss,
loss_per_byte, unigram_entropy, elapsed_seconds, and of a blend source_losses, a list of one number for each
source that has held-out text. "experts" follows "train" where there are some: aux_loss (their own losses, not
part of loss), max_load and min_load, lists of one number a layer: tokens of its busiest and idlest expert
over the mean of its experts, since the last record; with expert parallelism rank_load, the same of the
busiest rank of each layer, and stage_load, of each pipeline rank the load of its busiest rank in all its
layers together, and stage_spread, its standard deviation over microbatches; dropped_pairs, pairs of a token
and an expert that did not fit into the memory of a symmetric dispatcher, since then; stash_used and
stash_rows, the most rows of the first rank's activation stash in use, since it was allocated, and all of
them. Losses are nats per token or per byte; rates are those of all ranks together.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from fastmp.config.console import Console
from fastmp.config.file_access import open_writable
from fastmp.config.metrics_file import read_metrics as read_metrics
from fastmp.training.sinks import Sinks

SCHEMA = 1
_PIECE = 1 << 16  # bytes
# Dense bf16 peak of one device in FLOP/s (data sheets give twice that, with sparsity). Boards with
# other clocks, such as the PCIe ones, are left out rather than guessed.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12}


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a GPU in FLOP/s, or None if it is not known."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    if words & {"NVL", "MIG"} or (words & {"PCIE", "PCIe"} and "A100" not in words):
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if name in words), None)


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run that its log needs. Tokens and FLOPs count all ranks, forward and backward.

    `bytes_per_token` turns the loss into nats per byte (TokenDataset.bytes_per_token; None if
    unknown); `device` is a torch device name such as "cuda:0". `ep` is the number of expert-parallel ranks,
    `expert_stages` the pipeline rank of each layer with experts; empty: 0. `mtp_depth` is the number of MTP
    modules.
    """

    total_steps: int
    tokens_per_step: int
    flops_per_token: float = 0.0
    bytes_per_token: float | None = None
    device: str = "cpu"
    world_size: int = 1
    ep: int = 1
    expert_stages: tuple[int, ...] = ()
    mtp_depth: int = 0


class Experts(Protocol):
    """Tensors: `aux_loss` (), `counts` (layers, experts), and `dropped` () or a number.

    moments: (pipeline ranks, 3, expert-parallel ranks), see `fastmp.training.train_step.load_moments`; None
        without expert parallelism.
    stash: rows of this rank's activation stash, the most that were in use and all; None without one.
    """

    @property
    def aux_loss(self) -> Any: ...
    @property
    def counts(self) -> Any: ...
    @property
    def dropped(self) -> Any: ...
    @property
    def moments(self) -> Any: ...
    @property
    def stash(self) -> tuple[Any, int] | None: ...


def expert_loads(counts: list[list[int]]) -> list[list[float]]:
    """Return the tokens of each expert over the mean of its layer; 0 in a layer without tokens."""
    return [[count * len(layer) / max(sum(layer), 1) for count in layer] for layer in counts]


def rank_loads(counts: list[list[int]], ep: int) -> list[list[float]]:
    """Return the tokens of each expert-parallel rank over the mean of its layer, as `expert_loads`."""
    size = len(counts[0]) // ep if counts else 1
    return expert_loads([[sum(own[i : i + size]) for i in range(0, len(own), size)] for own in counts])


def stage_loads(moments: list[list[list[float]]]) -> tuple[list[float], list[float]]:
    """Return the load of each pipeline rank's busiest rank, and its standard deviation over microbatches.

    moments: see `Experts`. A pipeline rank without experts has a load of 0.
    """
    loads, spreads = [], []
    for numbers, sums, squares in moments:
        means = [total / max(number, 1) for number, total in zip(numbers, sums)]
        busiest = max(range(len(means)), key=means.__getitem__)
        variance = squares[busiest] / max(numbers[busiest], 1) - means[busiest] ** 2
        loads.append(1.0 + means[busiest] if numbers[busiest] else 0.0)
        spreads.append(math.sqrt(max(variance, 0.0)))
    return loads, spreads


class Display:
    """Print log lines; on a terminal they fit its width, above a line for the current step."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._console, self._clock = Console(stream), clock
        self._terminal, self._shown = self._console.is_terminal, -math.inf

    def line(self, *fields: str, first_to_go: Sequence[str] = ()) -> None:
        """Print `fields` on a line, without some of `first_to_go` if it is too long for a terminal."""
        kept, leaving = list(fields), list(first_to_go)
        while self._terminal and len("  ".join(kept)) > shutil.get_terminal_size().columns and leaving:
            kept.remove(leaving.pop(0))
        self._console.write("  ".join(kept), start=_CLEAR * self._terminal)

    def progress(self, text: str) -> None:
        """Rewrite the last line of a terminal, ten times a second at most."""
        now = self._clock()
        if self._terminal and now - self._shown > 0.1:
            self._shown = now
            self._console.write(text[: shutil.get_terminal_size().columns - 1], start=_CLEAR, end="")

    def close(self) -> None:
        """Leave the cursor at the beginning of an empty line."""
        self._console.write("", start=_CLEAR * self._terminal, end="")


_CLEAR = "\r\x1b[K"  # to the beginning of the line, and erase it


class TrainLog:
    """The log of one run. Every rank may have one and call it; only rank 0 prints and writes.

    `step` reads its tensors, a device synchronisation, only if `due(step)`: every `log_interval` steps, after
    the first and after the last one. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        directory: str | Path,
        run: RunInfo,
        *,
        log_interval: int = 10,
        start_step: int = 0,
        rank: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sinks: Callable[[], Sinks] | None = None,
    ) -> None:
        """Log into `directory`; `start_step` is the number of steps done before (a resumed run).

        sinks: opens where records go besides, on rank 0.
        """
        if log_interval < 1:
            raise ValueError(f"TrainLog: log_interval must be positive, got {log_interval}")
        self._run, self._interval, self._clock = run, log_interval, clock
        self._begin = self._window_begin = clock()
        self._window_step, self._paused = start_step, 0.0
        self._active = rank == 0
        if not self._active:
            return
        name = _device_name(run.device)
        self._peak = peak_flops(name)
        stream = sys.stdout if stream is None else stream
        self._path = Path(directory) / "metrics.jsonl"
        self._file = _open_for_append(self._path)
        self._display, self._eta = Display(stream, clock), ""
        self._sinks = sinks() if sinks else None
        self.record("run", start_step, schema=SCHEMA, **{**asdict(run), "device": name})

    def due(self, step: int) -> bool:
        """Return True if `step(step, ...)` will read its values; the same on every rank."""
        return step % self._interval == 0 or step in (1, self._run.total_steps)

    def progress(self, step: int) -> None:
        """Show that step number `step` is done, on a terminal; reads no tensor."""
        if self._active and not self.due(step):
            self._display.progress(f"{self._progress(step)}{self._eta}")

    def step(
        self,
        step: int,
        *,
        loss: Any,
        grad_norm: Any,
        lr: Any,
        mtp_loss: Any = None,
        experts: Experts | None = None,
    ) -> None:
        """Report after optimizer step number `step`, from 1: tensors or numbers, `loss` in nats per token.

        mtp_loss: of multi-token prediction, weighted, in nats per token; reported if the run has MTP modules.
        experts: losses per token and counts (layers, experts) of the steps since the last report.
        """
        if not self._active or not self.due(step):
            return
        values = {"loss": float(loss), "grad_norm": float(grad_norm), "lr": float(lr)}
        now = self._clock()
        seconds = max(now - self._window_begin - self._paused, 1e-9)
        steps = max(step - self._window_step, 1)
        tokens_per_second = steps * self._run.tokens_per_step / seconds
        flops_per_second = tokens_per_second * self._run.flops_per_token
        mfu = (
            flops_per_second / (self._peak * self._run.world_size)
            if self._peak and self._run.flops_per_token
            else None
        )
        eta = (self._run.total_steps - step) * seconds / steps
        self._window_begin, self._window_step, self._paused = now, step, 0.0
        memory = _memory_bytes(self._run.device)
        self.record(
            "train",
            step,
            **values,
            loss_per_byte=self._per_byte(values["loss"]),
            tokens_per_second=tokens_per_second,
            flops_per_second=flops_per_second,
            mfu=mfu,
            memory_bytes=memory,
            **({"mtp_loss": float(mtp_loss)} if self._run.mtp_depth else {}),
            eta_seconds=eta,
            elapsed_seconds=now - self._begin,
        )
        self._eta = f"  ETA {_clock_time(eta)}"
        norm, lr = f"grad_norm {values['grad_norm']:.3f}", f"lr {values['lr']:.2e}"
        speed, used = _speed(flops_per_second, mfu), f"{_scaled(memory)}B"
        loads = [] if experts is None else self._experts(step, experts)
        self._display.line(
            *(self._progress(step), f"loss {values['loss']:.4f}", *loads, norm, lr),
            *(f"{_scaled(tokens_per_second)}tok/s", *speed, used, self._eta.strip()),
            first_to_go=(*speed, used, lr, *loads, norm),
        )

    def _experts(self, step: int, experts: Experts) -> list[str]:
        """Record the expert load; return its fields of the line: the highest of all layers, and drops."""
        counts = experts.counts.tolist()
        loads = expert_loads(counts)
        highest, lowest = [max(layer) for layer in loads], [min(layer) for layer in loads]
        numbers = {"aux_loss": float(experts.aux_loss), "dropped_pairs": int(experts.dropped)}
        of_ranks: dict[str, list[float]] = {}
        if experts.moments is not None:
            of_ranks["rank_load"] = [max(layer) for layer in rank_loads(counts, self._run.ep)]
            of_ranks["stage_load"], of_ranks["stage_spread"] = stage_loads(experts.moments.tolist())
        fields = [f"expert load {max(highest):.2f}"]
        if numbers["dropped_pairs"]:
            fields.append(f"dropped {numbers['dropped_pairs']}")
        if experts.stash is not None:
            used, rows = int(experts.stash[0]), experts.stash[1]
            numbers |= {"stash_used": used, "stash_rows": rows}
            fields.append(f"stash {used / rows:.0%}")
        self.record("experts", step, **numbers, max_load=highest, min_load=lowest, **of_ranks)
        return fields

    def evaluation(
        self,
        step: int,
        *,
        loss: Any,
        loss_per_byte: float | None = None,
        unigram_entropy: float | None = None,
        source_losses: Mapping[str, float] | None = None,
    ) -> None:
        """Report a held-out loss after step `step`: `loss` in nats per token, the others in nats per byte.

        source_losses: that of each source of a blend, in nats per token.
        The held-out text has its own number of bytes per token, so `loss_per_byte` is not derived here.
        """
        if not self._active:
            return
        value = float(loss)
        self.record(
            "eval",
            step,
            loss=value,
            loss_per_byte=loss_per_byte,
            unigram_entropy=unigram_entropy,
            **({"source_losses": list(source_losses.values())} if source_losses else {}),
            elapsed_seconds=self._clock() - self._begin,
        )
        fields = [self._progress(step), f"held-out loss {value:.4f} nats/token"]
        if loss_per_byte is not None:
            fields.append(f"{loss_per_byte:.4f} nats/byte")
        fields += [f"{name} {each:.4f}" for name, each in (source_losses or {}).items()]
        entropy = [] if unigram_entropy is None else [f"unigram entropy {unigram_entropy:.4f}"]
        self._display.line(*fields, *entropy, first_to_go=entropy)

    def note(self, line: str) -> None:
        """Show a line of text, for people only."""
        if self._active:
            self._display.line(line)

    def record(self, kind: str, step: int, **fields: Any) -> None:
        """Append one record to metrics.jsonl and flush it."""
        if not self._active:
            return
        fields = {name: _finite(value) for name, value in fields.items()}
        with self._named():
            self._file.write(json.dumps({"kind": kind, "step": step, **fields}, allow_nan=False) + "\n")
            self._file.flush()
        if self._sinks and kind != "run":
            self._sinks.write(kind, step, fields)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add the path of metrics.jsonl to an OSError."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in this block (evaluation, saving) does not count as training."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def close(self) -> None:
        """Close the file and leave the terminal clean; more calls do nothing."""
        if self._active:
            self._active = False
            self._display.close()
            with self._named():
                self._file.close()
            if self._sinks:
                self._sinks.close()

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _progress(self, step: int) -> str:
        total = self._run.total_steps
        return f"step {step:>{len(str(total))}}/{total}"

    def _per_byte(self, loss: float) -> float | None:
        return None if self._run.bytes_per_token is None else loss / self._run.bytes_per_token


def _open_for_append(path: Path) -> TextIO:
    """Open `path` for appending, after removing an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_writable(path, "ab")
    end = file.seek(0, os.SEEK_END)
    last = b""
    while end and b"\n" not in last:  # backwards, a piece at a time
        begin = max(0, end - _PIECE)
        file.seek(begin)
        last, end = file.read(end - begin), begin
    file.truncate(end + last.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
    return io.TextIOWrapper(file, encoding="utf-8")


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    return torch.cuda.get_device_name(device)


def _memory_bytes(device: str) -> int:
    """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scaled(value: float) -> str:
    """1234567 -> "1.23 M"."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.3g} {prefixes[0]}"


def _speed(flops_per_second: float, mfu: float | None) -> list[str]:
    if not flops_per_second:
        return []
    return [f"{_scaled(flops_per_second)}FLOP/s"] + ([] if mfu is None else [f"MFU {mfu:.1%}"])


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
