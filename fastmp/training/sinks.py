"""Sinks for metrics besides metrics.jsonl: TensorBoard and Weights & Biases.

A sink takes every number of the records as KIND/NAME over the optimizer steps, a list's as KIND/NAME/0 and so
on. A run that resumes goes on in the same place: TensorBoard hides what was written past the start, Weights &
Biases gets the id that the first start left in runs/NAME/wandb-id. A sink that fails is left out from then
on, after one warning; training goes on.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fastmp.config.file_access import read_file, write_whole


def check_sinks(names: Collection[str]) -> None:
    """Raise ValueError, naming what to install, if the package of a sink is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"train.sinks: {name} is not installed: pip install {name}")


class _Sink(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    """Event files in runs/NAME/tensorboard."""

    def __init__(self, directory: Path, start_step: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = {"purge_step": start_step + 1} if start_step else {}
        self._writer = SummaryWriter(str(directory / "tensorboard"), **purge)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases; project, entity and mode come from its own environment variables.

    Its own count of steps never goes back, as a run that resumes from an earlier checkpoint does: `step` is a
    number beside the others, over which they are drawn.
    """

    def __init__(self, directory: Path, start_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        kept = directory / "wandb-id"
        known = read_file(kept, 1 << 10).decode().strip() if start_step and kept.exists() else None
        self._run = wandb.init(
            name=directory.name, dir=str(directory), id=known, resume="allow", config=dict(config)
        )
        write_whole(kept, self._run.id + "\n")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Callable[[Path, int, Mapping[str, Any]], _Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}


class Sinks:
    """The open sinks of a run, on the rank that writes its metrics."""

    def __init__(
        self, names: Collection[str], directory: Path, *, start_step: int, config: Mapping[str, Any]
    ) -> None:
        """Open the sinks of `names` for the run in `directory`, which has done `start_step` steps."""
        self._open: dict[str, _Sink] = {}
        for name in names:
            try:
                self._open[name] = _KINDS[name](directory, start_step, config)
            except Exception as error:
                _leave_out(name, error)

    def write(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Write the numbers of a record of metrics.jsonl to every sink."""
        numbers = dict(_numbers(kind, fields))
        self._each(lambda sink: sink.write(step, numbers))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._open.clear()

    def _each(self, action: Callable[[_Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                action(sink)
            except Exception as error:
                del self._open[name]
                _leave_out(name, error)


def _leave_out(name: str, error: Exception) -> None:
    warnings.warn(
        f"{name} gets no metrics from here on ({type(error).__name__}: {error}); metrics.jsonl has all",
        RuntimeWarning,
        stacklevel=4,
    )


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by name, without None, which stands for non-finite numbers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}/{index}", item)
    elif isinstance(value, (int, float)):
        yield name, value
