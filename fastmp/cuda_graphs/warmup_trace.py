"""Trace a warm-up step: run its chains eagerly, and record the inputs and outputs of their spans."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import Tensor
from torch.utils._pytree import TreeSpec

from fastmp.cuda_graphs.backends.interface import Backend
from fastmp.cuda_graphs.hooks import call_pre_hooks
from fastmp.cuda_graphs.partition import (
    CapturedSpan,
    Shared,
    Span,
    SpanTrace,
    called_modules,
    made_by,
    may_alias_grads,
    spec_of,
)
from fastmp.nn.segment import Tensors, run_segments
from fastmp.schedule.buffer_plan import SpanSpec, TensorSpec
from fastmp.schedule.schedule import FORWARD, Step

__all__ = ["WarmupTrace"]

Place = tuple[int, int]  # chunk, span


class WarmupTrace:
    """Runs the spans of one warm-up step eagerly and traces them.

    spans: the trace of each captured span, by (chunk, span).
    same_signatures: all microbatches had the same signatures.
    """

    def __init__(self, spans: Sequence[Sequence[Span]], backend: Backend) -> None:
        self._spans, self._backend = spans, backend
        self.spans: dict[Place, SpanTrace] = {}
        self.same_signatures = True
        self._arrived: dict[Place, list[TensorSpec]] = {}  # the gradients of outputs, as they came
        self._forwards: Counter[Place] = Counter()
        self._reached: dict[Place, set[int]] = defaultdict(set)  # the forwards to which any gradient came

    def specs(self, order: Sequence[Step]) -> list[list[SpanSpec]] | None:
        """Return the captured spans of each chunk for `plan_buffers`; None if the step is incomplete."""
        spans = [[span for span in spans if isinstance(span, CapturedSpan)] for spans in self._spans]
        planned = Counter(step.chunk for step in order if step.kind == FORWARD)
        places = [(chunk, i) for chunk, own in enumerate(spans) for i in range(len(own))]
        if not places or any(self._forwards[place] < max(1, planned[place[0]]) for place in places):
            return None
        if any(len(own) < self._forwards[place] for place, own in self._reached.items()):
            return None
        return [
            [self._spec((chunk, i), span) for i, span in enumerate(own)] for chunk, own in enumerate(spans)
        ]

    def _spec(self, place: Place, span: CapturedSpan) -> SpanSpec:
        gradients = tuple(self._arrived[place]) if place in self._reached else None
        return SpanSpec(span.name, tuple(spec for spec, _ in self.spans[place].inputs), gradients)

    def run_chain(self, chunk: int, tensors: Tensors, shared: Shared) -> tuple[Tensors, Tensors]:
        """Run the spans of a chunk eagerly; return (hidden tensors, auxiliary outputs)."""
        others: Tensors = ()
        number, may_alias = 0, False
        for span in self._spans[chunk]:
            call_pre_hooks(span.begins)
            given = tensors
            if isinstance(span, CapturedSpan):
                inputs = shared.append_to(tensors, span)
                tensors, more = self._run((chunk, number), span, inputs, shared.form, may_alias)
                may_alias |= any(t is each for t in (*tensors, *more) for each in given)
                number += 1
            else:
                tensors, more = run_segments(span.links, tensors, span.call, shared=shared.keywords)
                may_alias |= may_alias_grads(span, given, tensors)
            others += more
        return tensors, others

    def _run(
        self, place: Place, span: CapturedSpan, tensors: Tensors, shared: TreeSpec, may_alias: bool
    ) -> tuple[Tensors, Tensors]:
        may_alias = (
            may_alias or place[1] == 0
        )  # what comes before a chain is not known: it may keep gradients
        with called_modules() as called, self._backend.trace_draws() as draws:
            handed_on, others = span.through(tensors, shared)
        number = self._forwards[place]
        self._forwards[place] += 1
        made = [t for t in made_by((*handed_on, *others), tensors) if t.requires_grad]
        outputs = [spec_of(t) for t in made]
        inputs = [(spec_of(t), t.requires_grad) for t in tensors]
        now = SpanTrace(inputs, outputs, [*span.begins, *called], draws, may_alias)
        before = self.spans.get(place, now)
        self.same_signatures &= before[:3] == now[:3]
        self.spans[place] = before._replace(may_alias_grads=before.may_alias_grads or may_alias)
        self._arrived.setdefault(place, list(outputs))
        for i, output in enumerate(made):
            output.register_hook(functools.partial(self._note_gradient, place, number, i))
        return handed_on, others

    def _note_gradient(self, place: Place, number: int, i: int, grad: Tensor | None) -> None:
        if grad is not None:
            self._reached[place].add(number)
            self._arrived[place][i] = spec_of(grad)
