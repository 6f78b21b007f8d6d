"""The device work of a training step.

1. Zero the main gradients.
2. Run forward and backward of the microbatches. Buckets of gradients are reduced over the data-parallel group
   meanwhile, on the stream of `GradBuffer`.
3. Reduce the rest, and the gradients that pipeline stages share. Sum losses, token counts and stop requests
   over the dp-cp and pp groups in one all-reduce, and the counts of experts over all ranks in another.
4. Divide by the tokens of the global batch; compute the global gradient norm and the clip coefficient.
5. Update this rank's shards and start to all-gather the parameters.
6. Update the loss scale, and the biases of routers from the counts of their experts.

The host reads no number of a step, so one CUDA graph can contain all of it. If experts can make a step void
(see `rerun.py`), the host reads a count after 3., before anything but gradients has changed: a graph contains
1. to 3., another one the rest. Values that change from step to step are in tensors: batches, the scale of a
float16 loss, and the number of updates, which selects the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastmp.distributed.collectives import group_rank, group_size, sum_over_
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.router import update_expert_biases
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.grad_norm import clip_coefficient, global_grad_norm
from fastmp.optim.loss_scaler import LossScaler
from fastmp.optim.optimizer import Optimizer
from fastmp.profiling import phase
from fastmp.training.microbatches import Batch, MicrobatchRunner, Sums
from fastmp.training.step_counters import StepCounters

__all__ = ["ExpertWindow", "ReducedSums", "StepNumbers", "TrainStep"]


class ReducedSums(NamedTuple):
    """The sums of a step over all ranks, on the device; gradients are reduced.

    totals: (4,), see `Sums`. requests: as in `StepNumbers`. counts: (layers, experts), None without experts.
    dropped: () int64, all dropped assignments. void: (2,) int64, `VoidCounts`. moments: see `load_moments`.
    """

    totals: Tensor
    requests: Tensor
    counts: Tensor | None
    dropped: Tensor | None
    void: Tensor | None
    moments: Tensor | None


class StepNumbers(NamedTuple):
    """The numbers of a step, 0-dim tensors on the device; see `StepResult`.

    skipped: bool, the gradient was not finite.
    ends_run: bool, a skipped step counts towards `train.max_skipped_steps`; None: it does.
    requests: (reasons,), the ranks that were asked to stop, see `TrainStep`.
    expert_counts: (layers, experts).
    load_moments: (pipeline ranks, 3, expert-parallel ranks), see `load_moments`.
    """

    loss: Tensor
    num_tokens: Tensor
    grad_norm: Tensor
    lr: Tensor
    skipped: Tensor
    requests: Tensor
    ends_run: Tensor | None
    mtp_loss: Tensor
    aux_loss: Tensor | None
    expert_counts: Tensor | None
    dropped_pairs: Tensor | None
    load_moments: Tensor | None = None


class ExpertWindow(NamedTuple):
    """Sums of the expert statistics of some steps, on the device."""

    aux_loss: Tensor | float = 0.0
    counts: Tensor | int = 0
    dropped: Tensor | int = 0
    moments: Tensor | None = None
    steps: int = 0
    stash: tuple[Tensor, int] | None = None

    def add(self, numbers: StepNumbers) -> ExpertWindow:
        """Add a step of a model with experts."""
        aux_loss, counts, dropped = numbers.aux_loss, numbers.expert_counts, numbers.dropped_pairs
        assert aux_loss is not None and counts is not None and dropped is not None
        moments = numbers.load_moments
        if moments is not None and self.moments is not None:
            moments = self.moments + moments
        sums = (self.aux_loss + aux_loss, self.counts + counts, self.dropped + dropped)
        return ExpertWindow(*sums, moments, self.steps + 1)


@dataclass(frozen=True)
class TrainStep:
    """A training step in three parts, `backward`, `reduce` and `update`; `whole` is all of them.

    Attributes:
        routers: modules with `update_expert_bias`, see `Trainer`.
        counters: of dropped tokens, and of what makes a step void.
        clip_grad_norm: the largest gradient norm; 0: no clipping.
        learning_rates: (updates,) float64 on the device, the learning rate by the number of updates made so
            far; later updates have the last one.
        requests: (reasons,) float64 on the device, 1 for a reason in `stopping.REASONS` that this rank was
            asked to stop for. They are summed with the losses, which needs no further collective over data-
            and pipeline-parallel ranks.
    """

    runner: MicrobatchRunner
    grads: GradBuffer
    optimizer: Optimizer
    scaler: LossScaler | None
    groups: ParallelGroups
    routers: Sequence[nn.Module]
    counters: StepCounters
    clip_grad_norm: float
    learning_rates: Tensor
    requests: Tensor

    def whole(self, batches: Sequence[Batch]) -> StepNumbers:
        """Run a step on the batches of its microbatches, and wait for the parameters of other ranks."""
        return self.updated(self.reduced(batches))

    def reduced(self, batches: Sequence[Batch]) -> ReducedSums:
        """Run a step on the batches of its microbatches up to its sums (1. to 3.)."""
        return self.reduce(self.backward(batches.__getitem__))

    def updated(self, sums: ReducedSums) -> StepNumbers:
        """Run the rest of a step (4. to 6.), and wait for the parameters of other ranks."""
        numbers = self.update(sums)
        self.optimizer.gather.wait()
        return numbers

    def backward(self, fetch: Callable[[int], Batch]) -> Sums:
        """Run forward and backward of the microbatches `fetch(0)`, `fetch(1)`, ... (1. and 2.)."""
        self.grads.zero()
        if self.scaler is None:
            return self.runner.train(fetch)
        scale = self.scaler.scale
        return self.runner.train(lambda number: {**fetch(number), "loss_grad": scale}, scale)

    def reduce(self, sums: Sums) -> ReducedSums:
        """Sum gradients and all numbers of a step over ranks (3.)."""
        totals, counts, loads = sums
        with phase("reduce"):
            self.grads.reduce()
            self.runner.sum_shared_gradients(self.grads)
            own = [totals, self.requests]
            if self.groups.ep is not None and counts is not None:
                own.append(load_moments(loads, self.groups, self.requests).flatten())
            numbers = sum_over_(torch.cat(own), self.groups.dp_cp, self.groups.pp)
            totals, requests, *more = numbers.split([*map(len, own)])
            moments = more[0].view(-1, 3, group_size(self.groups.ep)) if more else None
            if self.groups.tp is not None:  # its ranks have equal sums, but a signal may reach one of them
                requests = sum_over_(requests.clone(), self.groups.tp)
            if counts is None and not self.counters.checked:
                return ReducedSums(totals, requests, None, None, None, None)
            # Counts of experts and of dropped tokens, in the same collectives.
            experts = () if counts is None else (counts.flatten(),)
            both = torch.cat((*experts, self.counters.take()))
            sum_over_(both, self.groups.tp_cp_dp, self.groups.pp)
            dropped, void = both[-3], both[-2:]
            counts = None if counts is None else both[:-3].view_as(counts)
        return ReducedSums(totals, requests, counts, dropped, void, moments)

    def update(self, sums: ReducedSums, before_change: Callable[[], None] = lambda: None) -> StepNumbers:
        """Update by reduced gradients (4. to 6.); `before_change` is called before anything changes."""
        totals, requests, counts, dropped, _, moments = sums
        with phase("clip"):
            loss, num_tokens, aux_loss, mtp_loss = totals.unbind()
            per_token = num_tokens.clamp(min=1).reciprocal()  # a batch without a token: loss and gradient 0
            inv_scale = per_token if self.scaler is None else per_token * self.scaler.inv_scale
            grad_norm = inv_scale * global_grad_norm(self.grads, **self.groups.norm)
            clip = clip_coefficient(grad_norm, self.clip_grad_norm)
        before_change()
        with phase("optimizer"):
            lr = self.learning_rate()
            self.optimizer.step(lr, grad_norm=grad_norm, inv_scale=inv_scale, clip_coefficient=clip)
        skipped, ends_run = ~torch.isfinite(grad_norm), None
        if self.scaler is not None:  # where the scale can halve, the next step may be finite
            ends_run = self.scaler.scale <= self.scaler.min_scale
            self.scaler.update(skipped)
        if counts is not None:
            with phase("balance"):
                self._balance(counts.masked_fill(skipped, 0))
        return StepNumbers(
            loss=loss * per_token,
            num_tokens=num_tokens,
            grad_norm=grad_norm,
            lr=lr,
            skipped=skipped,
            requests=requests,
            ends_run=ends_run,
            mtp_loss=mtp_loss * per_token,
            aux_loss=None if counts is None else aux_loss * per_token,
            expert_counts=counts,
            dropped_pairs=None if counts is None else dropped,
            load_moments=moments,
        )

    def learning_rate(self) -> Tensor:
        """Return the learning rate of the next update, 0-dim; skipped steps do not advance the schedule."""
        updates = self.optimizer.counts()["steps"]
        return self.learning_rates.take(updates.clamp(max=len(self.learning_rates) - 1))

    def _balance(self, counts: Tensor) -> None:
        """Pass every router the counts of its experts; counts: (layers, experts) of the global batch."""
        rows = self.runner.own_rows(counts)
        if not self.routers:
            return
        if len(self.routers) != len(rows):
            raise ValueError(
                f"Trainer: the model has {len(self.routers)} routers, the counts of the loss function "
                f"{len(rows)} rows"
            )
        update_expert_biases(self.routers, rows)


def load_moments(loads: Tensor | None, groups: ParallelGroups, like: Tensor) -> Tensor:
    """Return how the loads of expert-parallel ranks spread over microbatches, to be summed over all ranks.

    loads: (microbatches, experts), the tokens of this rank, see `Sums`; None: this rank has no experts. All
    ranks of an expert group call it together.

    Returns (pp, 3, ep): at this pipeline rank the number of microbatches, and for each expert-parallel rank
    the sums of its load in all layers together (over the mean, minus 1) and of the squares.
    """
    pp, ep = group_size(groups.pp), group_size(groups.ep)
    moments = like.new_zeros((pp, 3, ep), dtype=torch.float64)
    if loads is not None:
        tokens = sum_over_(loads.view(len(loads), ep, -1).sum(2), groups.etp_ep)
        load = tokens.double() * ep / tokens.sum(1, keepdim=True).clamp(min=1) - 1.0
        moments[group_rank(groups.pp)] = torch.stack((torch.ones_like(load), load, load.square())).sum(1)
    return moments
