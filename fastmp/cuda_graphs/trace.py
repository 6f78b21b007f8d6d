"""Runs the chains of a training step eagerly, and notes what enters and leaves their runs."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import Tensor
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.base import Backend
from fastmp.cuda_graphs.buffer_plan import RunSpec, TensorSpec
from fastmp.cuda_graphs.hooks import call_pre_hooks
from fastmp.cuda_graphs.partition import (
    Observed,
    Part,
    Run,
    Shared,
    called_modules,
    keeps_gradients,
    made_by,
    spec_of,
)
from fastmp.nn.segment import Tensors, run_links
from fastmp.pipeline.schedule import FORWARD, Step

__all__ = ["ObservedStep"]

Place = tuple[int, int]  # chunk, run


class ObservedStep:
    """What one eager step shows of the runs in `parts`, those of each chunk.

    runs: what is seen of each run, by (chunk, run). alike: whether all microbatches had the same signatures.
    """

    def __init__(self, parts: Sequence[Sequence[Part]], backend: Backend) -> None:
        self._parts, self._backend = parts, backend
        self.runs: dict[Place, Observed] = {}
        self.alike = True
        self._arrived: dict[Place, list[TensorSpec]] = {}  # the gradients of outputs, as they came
        self._forwards: Counter[Place] = Counter()
        self._reached: dict[Place, set[int]] = defaultdict(set)  # the forwards to which any gradient came

    def specs(self, order: Sequence[Step]) -> list[list[RunSpec]] | None:
        """The runs of each chunk, for a plan; None: the step has not come to the end of its `order`."""
        runs = [[part for part in parts if isinstance(part, Run)] for parts in self._parts]
        planned = Counter(step.chunk for step in order if step.kind == FORWARD)
        places = [(chunk, i) for chunk, own in enumerate(runs) for i in range(len(own))]
        if not places or any(self._forwards[place] < max(1, planned[place[0]]) for place in places):
            return None
        if any(len(own) < self._forwards[place] for place, own in self._reached.items()):
            return None
        return [[self._spec((chunk, i), run) for i, run in enumerate(own)] for chunk, own in enumerate(runs)]

    def _spec(self, place: Place, run: Run) -> RunSpec:
        gradients = tuple(self._arrived[place]) if place in self._reached else None
        return RunSpec(run.name, tuple(spec for spec, _ in self.runs[place].inputs), gradients)

    def run_chain(self, chunk: int, tensors: Tensors, shared: Shared) -> tuple[Tensors, Tensors]:
        """Run the parts of a chunk; what the chain hands on, and what its layers return besides."""
        others: Tensors = ()
        number, keeps = 0, False
        for part in self._parts[chunk]:
            call_pre_hooks(part.begins)
            given = tensors
            if isinstance(part, Run):
                inputs = shared.beside(tensors, part)
                tensors, more = self._run((chunk, number), part, inputs, shared.form, keeps)
                keeps |= any(t is each for t in (*tensors, *more) for each in given)
                number += 1
            else:
                tensors, more = run_links(part.links, tensors, part.call, shared=shared.keywords)
                keeps |= keeps_gradients(part, given, tensors)
            others += more
        return tensors, others

    def _run(
        self, place: Place, run: Run, tensors: Tensors, shared: TreeSpec, keeps: bool
    ) -> tuple[Tensors, Tensors]:
        keeps = keeps or place[1] == 0  # what comes before a chain is not known: it may keep gradients
        with called_modules() as called, self._backend.watch() as watched:
            handed_on, others = run.through(tensors, shared)
        number = self._forwards[place]
        self._forwards[place] += 1
        made = [t for t in made_by((*handed_on, *others), tensors) if t.requires_grad]
        outputs = [spec_of(t) for t in made]
        inputs = [(spec_of(t), t.requires_grad) for t in tensors]
        now = Observed(inputs, outputs, [*run.begins, *called], watched, keeps)
        before = self.runs.get(place, now)
        self.alike &= before[:3] == now[:3]
        self.runs[place] = before._replace(keeps=before.keeps or keeps)
        self._arrived.setdefault(place, list(outputs))
        for i, output in enumerate(made):
            output.register_hook(functools.partial(self._note_gradient, place, number, i))
        return handed_on, others

    def _note_gradient(self, place: Place, number: int, i: int, grad: Tensor | None) -> None:
        if grad is not None:
            self._reached[place].add(number)
            self._arrived[place][i] = spec_of(grad)
