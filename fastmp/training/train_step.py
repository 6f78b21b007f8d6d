"""What a training step does on the device: microbatches, sums over ranks, clipping, the update, the routers.

The host reads none of its numbers, so that all of it can be one graph. What changes from step to step is in
tensors: the batches, the scale of a float16 loss, and the counts of steps, which select the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastmp.distributed.collectives import sum_over_
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.grad_norm import clip_coefficient, global_grad_norm
from fastmp.optim.loss_scaler import LossScaler
from fastmp.optim.optimizer import Optimizer
from fastmp.profiling import phase
from fastmp.training.microbatches import Batch, PipelineRunner, SingleStageRunner, Sums

__all__ = ["TrainStep", "ExpertWindow", "StepNumbers"]


class StepNumbers(NamedTuple):
    """The numbers of a step, 0-dim tensors; see `StepResult`.

    skipped: whether the gradient was not finite. ends_run: whether a skipped step counts among those that end
    a run; None: it does. requests: by how many ranks, see `TrainStep`. expert_counts: (layers, experts).
    """

    loss: Tensor
    num_tokens: Tensor
    grad_norm: Tensor
    lr: Tensor
    skipped: Tensor
    requests: Tensor
    ends_run: Tensor | None
    aux_loss: Tensor | None
    expert_counts: Tensor | None
    dropped_pairs: Tensor | None


class ExpertWindow(NamedTuple):
    """Numbers of experts, summed over some steps; nothing of it has been read."""

    aux_loss: Tensor | float = 0.0
    counts: Tensor | int = 0
    dropped: Tensor | int = 0
    steps: int = 0

    def add(self, aux_loss: Tensor, counts: Tensor, dropped: Tensor) -> ExpertWindow:
        return ExpertWindow(
            self.aux_loss + aux_loss, self.counts + counts, self.dropped + dropped, self.steps + 1
        )


@dataclass(frozen=True)
class TrainStep:
    """A step of `runner` and `optimizer`, in two halves; `whole` is both.

    routers: modules with `update_expert_bias`, see `Trainer`. dropped_pairs: what layers have counted, see
    `fastmp.nn.moe.MoELayer`. clip_grad_norm: the norm to which gradients are clipped; 0: they are not.
    num_microbatches: of a step. learning_rates: 1-dim float64 tensor on the device, the learning rate by the
    number of updates made so far; after its end, the last one. requests: 1-dim float64 tensor on the device,
    1 where this rank has been asked to stop for the reason of that place in `stopping.REASONS`. Requests are
    summed with the losses: data- and pipeline-parallel ranks need no further collective, and no host waits.
    """

    runner: SingleStageRunner | PipelineRunner
    grads: GradBuffer
    optimizer: Optimizer
    scaler: LossScaler | None
    groups: ParallelGroups
    routers: Sequence[nn.Module]
    dropped_pairs: Sequence[Tensor]
    clip_grad_norm: float
    num_microbatches: int
    learning_rates: Tensor
    requests: Tensor

    def whole(self, batches: Sequence[Batch]) -> StepNumbers:
        """A step on the batches of its microbatches; other ranks' parameters have come at its end."""
        numbers = self.update(self.backward(batches.__getitem__))
        self.optimizer.gather.wait()
        return numbers

    def backward(self, fetch: Callable[[int], Batch]) -> Sums:
        """Run forward and backward of the microbatches `fetch(0)`, ...; nothing is summed over ranks yet."""
        self.grads.zero()
        if self.scaler is None:
            return self.runner.train(fetch, self.num_microbatches)
        scale = self.scaler.scale
        return self.runner.train(
            lambda number: {**fetch(number), "loss_grad": scale}, self.num_microbatches, scale
        )

    def update(self, sums: Sums, before_change: Callable[[], None] = lambda: None) -> StepNumbers:
        """Sum over ranks and update parameters; `before_change` is called before anything of them changes."""
        (totals, counts), dropped = sums, None
        with phase("reduce"):
            self.grads.reduce()
            self.runner.sum_shared_gradients(self.grads)
            numbers = sum_over_(torch.cat((totals, self.requests)), self.groups.dp_cp, self.groups.pp)
            totals, requests = numbers.split((len(totals), len(self.requests)))
            if self.groups.tp is not None:  # its ranks have equal sums, but a signal may reach one of them
                requests = sum_over_(requests.clone(), self.groups.tp)
            if counts is not None:
                counts, dropped = self._of_all_ranks(counts)
        with phase("clip"):
            loss, num_tokens, aux_loss = totals.unbind()
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
            aux_loss=None if counts is None else aux_loss * per_token,
            expert_counts=counts,
            dropped_pairs=dropped,
        )

    def learning_rate(self) -> Tensor:
        """Return the learning rate of the next update, 0-dim; skipped steps do not advance it."""
        updates = self.optimizer.counts()["steps"]
        return self.learning_rates.take(updates.clamp(max=len(self.learning_rates) - 1))

    def take_dropped(self) -> Tensor:
        """The pairs that this rank has dropped since this was last asked, (); int64."""
        numbers = [each.clone() for each in self.dropped_pairs]
        for each in self.dropped_pairs:
            each.zero_()
        device = next(iter(self.grads.parameters.values())).device
        return torch.stack([torch.zeros((), dtype=torch.int64, device=device), *numbers]).sum()

    def _of_all_ranks(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the counts of experts over ranks and, in the same collectives, the pairs that were dropped."""
        both = torch.cat((counts.flatten(), self.take_dropped().view(1)))
        sum_over_(both, self.groups.tp_cp_dp, self.groups.pp)
        return both[:-1].view_as(counts), both[-1]

    def _balance(self, counts: Tensor) -> None:
        """Let every router see what its experts got: counts (layers, experts) of the global batch."""
        rows = self.runner.own_rows(counts)
        if self.routers and len(self.routers) != len(rows):
            raise ValueError(
                f"Trainer: the model has {len(self.routers)} routers, the counts of the loss function "
                f"{len(rows)} rows"
            )
        for router, own in zip(self.routers, rows):
            router.update_expert_bias(own)
