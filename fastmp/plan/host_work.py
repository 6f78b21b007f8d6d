"""Host work of a layer: the launches that the host makes for one microbatch, eager or of CUDA graphs."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from fastmp.config import GPTConfig, GraphConfig
from fastmp.cuda_graphs.scope import captured_segments
from fastmp.plan.kernels import LAUNCHES
from fastmp.plan.segments import all_segments, segments
from fastmp.plan.shapes import Shapes

_WHOLE = {"full", "full_step"}
_AFTER_A_WAIT = 2  # launches until the device has work again, after the host has waited for it


class HostWork(NamedTuple):
    """Launches of the host for a layer and microbatch. waits: of the host for the device, in a forward."""

    forward: int
    backward: int
    waits: int = 0

    def exposed_forward(self, launch: float, device: float) -> float:
        """Return the seconds that a forward of `device` seconds takes longer for the host's sake.

        launch: seconds of the host for a launch.
        """
        return max(0.0, self.forward * launch - device) + self.waits * _AFTER_A_WAIT * launch

    def exposed_backward(self, launch: float, device: float) -> float:
        """Return the same of a backward, in which the host does not wait."""
        return max(0.0, self.backward * launch - device)


NO_HOST_WORK = HostWork(0, 0)


def host_work(shapes: Shapes, kind: GPTConfig, graphs: GraphConfig) -> HostWork:
    """Return the host's work for a layer of this `kind` of the model of `shapes`."""
    of_layer = shapes.of_kind(kind)
    waits = int(kind.moe is not None and of_layer.dispatcher.host_syncs)
    if not graphs.enabled:
        captured = set[str]()
    elif _WHOLE & set(graphs.scope or ()):
        return HostWork(0, 0, waits)
    else:
        captured = captured_segments(graphs.scope, all_segments(shapes))
    forward = backward = 0
    for replayed, span in groupby(segments(of_layer), lambda part: part.name in captured):
        launches = [(1, 1)] if replayed else [LAUNCHES[part.name] for part in span]
        forward += sum(own for own, _ in launches)
        backward += sum(own for _, own in launches)
    return HostWork(forward, backward, waits)
