"""Callback of `transformers.Trainer` that logs the expert load; this module imports transformers."""

from __future__ import annotations

import re
from typing import Any

from transformers import TrainerCallback

from fastmp.hf.expert_load import ExpertLoad


class ExpertLoadCallback(TrainerCallback):
    """Log the expert load (max/mean) of a model with experts beside the loss.

    The entries are means over the steps since the last log: "expert_load" of the layer with the highest, and
    "expert_load/layers.N" of each layer. They are in `trainer.state.log_history` and in the output. Reporters
    such as W&B get what callbacks before them have added: insert the callback at the front.

    Example (needs transformers):
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[ExpertLoadCallback()])
        >>> trainer.callback_handler.callbacks.insert(0, ExpertLoadCallback())  # instead, for W&B too
    """

    def __init__(self) -> None:
        self.load: ExpertLoad | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.load = ExpertLoad(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.load is not None:
            self.load.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.load is None or "loss" not in logs or not (loads := self.load.read()):
            return
        entries = {"expert_load": max(load.mean for load in loads.values())}
        for name, load in loads.items():
            layer = re.search(r"layers\.\d+", name)
            entries[f"expert_load/{layer.group() if layer else name}"] = load.mean
        logs.update(entries)
        state.log_history[-1].update(entries)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.load is not None:
            self.load.remove()
            self.load = None
