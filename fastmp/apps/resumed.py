"""Lines on what a resumed run does differently from the run that saved its checkpoint, from both recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastmp.config import OptimizerConfig, Recipe
from fastmp.config.file_access import FOREIGN_ERRORS, read_json
from fastmp.optim.lr_schedule import learning_rate

__all__ = ["changes_since"]

_SCHEDULE = ("schedule", "lr", "min_lr", "warmup_steps", "decay_steps")
_STEADY = 0.05  # of the learning rate: a jump below it is no news


def changes_since(recipe: Recipe, checkpoint: Path, step: int) -> list[str]:
    """Return a line for a learning rate that jumps, and one for data read from another place.

    Args:
        recipe: of the run that resumes after `step` steps.
        checkpoint: its path, in checkpoints/ of the run that saved it; without the recipe.json of that run,
            nothing can be compared.
    """
    try:
        before = read_json(checkpoint.resolve().parent.parent / "recipe.json", 1 << 24)
    except ValueError:
        return []
    now = json.loads(json.dumps(asdict(recipe)))
    try:
        return [*_rate(recipe, before, now, step), *_data(before, now, step)]
    except FOREIGN_ERRORS:  # another program's recipe.json
        return []


def _rate(recipe: Recipe, before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Iterator[str]:
    if not step:
        return
    changed = [*_changed(before, now, "train", ("steps",)), *_changed(before, now, "optimizer", _SCHEDULE)]
    own = {name: before["optimizer"][name] for name in _SCHEDULE if name in before["optimizer"]}
    last = learning_rate(step - 1, OptimizerConfig(**own), before["train"]["steps"])
    expected = learning_rate(step, OptimizerConfig(**own), before["train"]["steps"])
    new = learning_rate(step, recipe.optimizer, recipe.train.steps)
    if changed and min(abs(new - rate) for rate in (last, expected)) > _STEADY * max(last, expected):
        kept = f"--optimizer.schedule constant --optimizer.lr {last!r}"
        if step < recipe.optimizer.warmup_steps:  # in which every schedule grows
            kept += " --optimizer.warmup-steps 0"
        yield (
            f"warning: the learning rate is {new:.2e} in step {step + 1}, it was {last:.2e} in step {step}: "
            f"{', '.join(changed)}; to keep the rate: {kept}"
        )


def _data(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Iterator[str]:
    if not step:
        return
    if source := _changed(before, now, "data", _source(before, now)):
        yield f"warning: {', '.join(source)}: reading begins at step {step + 1} of its order"
        return
    batch = _changed(before, now, "train", ("global_batch_size",))
    cut = _changed(before, now, "data", ("seq_len",))
    if not (batch or cut):
        return
    sizes = [recipe["train"]["global_batch_size"] for recipe in (before, now)]
    lengths = [recipe["data"]["seq_len"] for recipe in (before, now)]
    read, begin = (step * size * length for size, length in zip(sizes, lengths))
    where = f"step {step + 1} begins after {begin:,} tokens of the data's order, and {read:,} were read"
    other = "samples are cut anew, so some text is read again or left out" if cut else where
    kept = [f"--data.seq-len {lengths[0]}"] if cut else []
    kept += [f"--train.global-batch-size {sizes[0]}"] if batch else []
    yield f"warning: {', '.join([*cut, *batch])}: {other}; to read on in order: {' '.join(kept)}"


def _source(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of `data` that name the text: `text` only where a run has no files."""
    files = ("path", "blend")
    named = all(any(recipe["data"].get(name) for name in files) for recipe in (before, now))
    return files if named else (*files, "text")


def _changed(
    before: Mapping[str, Any], now: Mapping[str, Any], table: str, names: tuple[str, ...]
) -> list[str]:
    """Return "table.name is A, was B" for each value that differs."""
    pairs = [(name, before[table].get(name, now[table][name]), now[table][name]) for name in names]
    return [f"{table}.{name} is {new}, was {old}" for name, old, new in pairs if old != new]
