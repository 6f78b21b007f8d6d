"""The base of optimizers on flat buffers: state, skipping of steps, ZeRO-1 gathers and state dicts.

A step has four parts:
    1. wait for the parameters of the last step that no forward has used (all-gathers of the dp group);
    2. update this rank's shard of each bucket on the current stream, in the order in which forward uses it;
    3. start to all-gather a bucket as soon as its shards are updated, on the stream of the collectives; with
       FP8 weights, whose scales all ranks need first, when all shards are updated (`fp8_gather`);
    4. wait for the buckets that no forward hook waits for.

The host waits for nothing: norm, clip coefficient and the flag that skips a step are tensors on the device.
ZeRO: Rajbhandari et al. (2020), stage 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.optim.flat_params import FlatState, check_separate
from fastmp.optim.grad_buffers import FlatBuffer, GradBuffer, is_vector
from fastmp.optim.param_all_gather import ParameterGather

__all__ = ["Optimizer", "ParameterGroup", "check_range", "has_other_ranks", "step_observers"]

# Called with each optimizer and the learning rate that its step gets, before the step.
step_observers: list[Callable[[Optimizer, float | Tensor | None], None]] = []


class ParameterGroup(NamedTuple):
    """The options of some parameters. lr: a factor of the optimizer's learning rate."""

    lr: float = 1.0
    weight_decay: float = 0.0


class Optimizer(ABC):
    """An optimizer on the main gradients of a `GradBuffer`; subclasses add the update rule.

    A subclass implements `make_state` and `update`. It is a choice of `optimizer.name` once it is registered
    as a `fastmp.config.OptimizerSpec`.

    Args:
        grads: the gradients. If they are sharded (ZeRO-1), a rank holds the state of its own shards and
            updates these; then all ranks gather the parameters.
        lr: the learning rate, unless `step` gets another: a number, or a 0-dim float32 or float64 tensor.
        weight_decay: of parameters with two dimensions or more; biases and norms are not decayed (parameters
            of experts have one dimension more).
        group: (name, parameter) -> the group of the parameter, in place of `weight_decay`. It is called once,
            and must return the same on all ranks that hold a parameter.
        states: "classic": float32 moments and, for 16-bit parameters, float32 master weights. "small": for
            bfloat16 parameters, a remainder of 16 bits that makes the parameter an exact float32 master
            weight, and bfloat16 moments if the optimizer supports them. A float64 parameter has float64
            state; a float32 or float64 parameter is its own master weight.

    The parameters move: `param.data` becomes a view of a flat buffer, with the strides it had, and no longer
    shares memory with a `param.data` taken before. So make the optimizer once the model has its device and
    dtype. Tied weights, which are one Parameter, stay tied. A low-precision parameter is written from its
    master weight at every step, so load weights before you make the optimizer. A parameter that is frozen
    later has a gradient of zero, and is decayed and moved by its moments. A rank without trainable
    parameters, such as a frozen pipeline stage, counts the steps.

    Attributes:
        parameters: {name: parameter}.
        flats: the state of each buffer.
        order: their buckets as (buffer, bucket), in the order in which forward uses them.
        gather: makes forward wait for parameters, see `ParameterGather.attach`.
        skipped_steps: 0-dim int64 tensor, the steps that were skipped for a grad norm that was not finite.

    Raises:
        ValueError: a buffer without parameters on the only rank, parameters that share memory, small states
            for parameters of another dtype, or a negative `lr` or `weight_decay`, also of a group.
    """

    def __init__(
        self,
        grads: GradBuffer,
        *,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.01,
        group: Callable[[str, Parameter], ParameterGroup] | None = None,
        states: str = "classic",
    ) -> None:
        self.name = type(self).__name__
        self.parameters = grads.parameters
        if not self.parameters and not has_other_ranks():
            raise ValueError(f"{self.name}: no parameters given")
        if states not in ("classic", "small"):
            raise ValueError(f"{self.name}: states must be 'classic' or 'small', got {states!r}")
        if not isinstance(lr, Tensor):
            check_range(self.name, lr=lr)
        check_range(self.name, weight_decay=weight_decay)
        check_separate(self.name, self.parameters)
        if group is None:
            group = _decayed_matrices(weight_decay)
        self.group_of = {name: group(name, param) for name, param in self.parameters.items()}
        for name, each in self.group_of.items():
            check_range(f"{self.name}: group of {name!r}", **each._asdict())
        self.lr: float | Tensor = lr
        self.states = states
        self.flats = [self.make_state(flat, number) for number, flat in enumerate(grads.flats)]
        self.order = grads.order[::-1]  # what forward uses first comes first
        self.gather = ParameterGather(grads.flats)
        self._updated: list[tuple[int, int]] = []  # buckets whose all-gather waits for scales
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=grads.device)
        # A rank without parameters counts by itself: checkpoints and learning rates need its numbers.
        self._steps = self.flats[0].steps[0] if self.flats else torch.zeros_like(self.skipped_steps)

    @abstractmethod
    def make_state(self, grads: FlatBuffer, number: int) -> FlatState:
        """Return the parameters and the state of buffer `number`, whose gradients are `grads`."""

    @abstractmethod
    def update(self, skip: Tensor | None, inv_scale: Tensor | None, clip_coefficient: Tensor | None) -> None:
        """Update this rank's shard of every bucket from its main gradients, and `start_gather` each.

        Args:
            skip: 0-dim bool tensor; if True, parameters, moments and `steps` keep their bits. None: False.
            inv_scale, clip_coefficient: 0-dim factors of the gradients, or None.
        """

    @torch.no_grad()
    def step(
        self,
        lr: float | Tensor | None = None,
        *,
        grad_norm: Tensor | None = None,
        inv_scale: Tensor | None = None,
        clip_coefficient: Tensor | None = None,
    ) -> None:
        """Update the parameters from their main gradients.

        Args:
            lr: the learning rate, a number or a 0-dim tensor that a captured CUDA graph reads at each replay;
                None: the last one.
            grad_norm: 0-dim tensor, equal on all ranks. If it is not finite, parameters and state keep their
                bits and `skipped_steps` grows by one.
            inv_scale, clip_coefficient: 0-dim tensors that the gradients are multiplied by as they are read.
        """
        for observe in step_observers:
            observe(self, lr)
        if lr is not None:
            self.lr = lr
        skip = None if grad_norm is None else ~torch.isfinite(grad_norm)
        self.gather.wait()  # for what no forward has used since the last step
        for flat in self.flats:
            flat.check()
        self._updated = []  # a step that has failed may have left some
        self.update(skip, inv_scale, clip_coefficient)
        if not self.flats:
            self._steps += 1 if skip is None else ~skip
        self._start_updated()
        # The kernel counts a new version of its buffers, which parameters do not share.
        torch.autograd.graph.increment_version(self.parameters.values())
        if skip is not None:
            self.skipped_steps += skip
        self.gather.end_step()

    def start_gather(self, at: tuple[int, int]) -> None:
        """Start the all-gather of a bucket whose shard this rank has updated; with FP8 weights, note it."""
        flat = self.flats[at[0]]
        if not flat.sharded or flat.grads.group is None:
            return
        if any(each.fp8 is not None for each in self.flats):
            self._updated.append(at)
        else:
            self.gather.start(at, flat.bucket(at[1]), flat.grads.group)

    def _start_updated(self) -> None:
        """Start the all-gathers that wait for the scales of FP8 weights."""
        if not self._updated:
            return
        # 1. One all-reduce for each buffer of FP8 weights. No all-gather is before it on the stream of the
        #    collectives, so that compute waits for the all-reduces alone.
        shards = [flat.fp8 for flat in self.flats if flat.fp8 is not None]
        for each, started in [(each, each.start_scales()) for each in shards]:
            each.set_scales(*started)
        # 2. Cast and gather bucket by bucket, in the order in which forward uses them.
        for at in self._updated:
            flat = self.flats[at[0]]
            assert flat.grads.group is not None, "it is sharded"
            if flat.fp8 is None:
                self.gather.start(at, flat.bucket(at[1]), flat.grads.group)
            else:
                flat.fp8.cast(at[1])
                arrived = partial(flat.fp8.arrived, at[1])
                self.gather.start(at, flat.fp8.bucket(at[1]), flat.grads.group, arrived)
        for each in shards:
            each.end_cast()
        self._updated = []

    def master(self, name: str) -> Tensor:
        """Return this rank's shard of a master weight, as in `state_dict`; a copy with small states."""
        if name not in self.parameters:
            raise ValueError(f"{self.name}.master: there is no parameter {name!r}")
        return next(flat for flat in self.flats if name in flat.grads.parameters).master_of(name)

    def state_dict(self) -> dict[str, Any]:
        """Return {"step", "skipped_steps": 0-dim tensors, "state": {name: {moment: tensor}}}, not copied.

        A low-precision parameter has one more entry, "master" or, with small states, "remainder". Entries
        have the shape of the parameter, or are flat if this rank holds a shard of it; parameters that it
        holds nothing of are left out.
        """
        entries = {name: each for flat in self.flats for name, each in flat.entries().items()}
        state = {name: entries[name] for name in self.parameters if name in entries}
        return {"step": self.counts()["steps"], "skipped_steps": self.skipped_steps, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy `state_dict` (counts as tensors or numbers) into the optimizer, and round parameters from it.

        The parameters of a sharded optimizer are gathered: every rank calls it.

        Raises:
            ValueError: parameters that only one side has, or an entry of another shape; the message names it.
        """
        self.gather.wait()
        mine, loaded = self.state_dict()["state"], state_dict["state"]
        if mine.keys() != loaded.keys():
            raise ValueError(
                f"{self.name}.load_state_dict: only in the optimizer "
                f"{sorted(mine.keys() - loaded.keys())[:3]}, only in the state "
                f"{sorted(loaded.keys() - mine.keys())[:3]}"
            )
        pairs = [(n, key, own, loaded[n].get(key)) for n, own_n in mine.items() for key, own in own_n.items()]
        for name, key, own, new in pairs:
            got = "nothing" if new is None else tuple(new.shape)
            if got != tuple(own.shape):
                raise ValueError(
                    f"{self.name}.load_state_dict: {name}.{key} is {tuple(own.shape)} here, got {got}"
                )
        for _, _, own, new in pairs:
            own.copy_(new)
        self.counts()["steps"].fill_(state_dict["step"])
        self.skipped_steps.fill_(state_dict["skipped_steps"])
        self.loaded()

    def counts(self) -> dict[str, Tensor]:
        """Return {"steps", "skipped_steps": 0-dim int64 tensors}, not copied."""
        return {"steps": self._steps, "skipped_steps": self.skipped_steps}

    @torch.no_grad()
    def loaded(self) -> None:
        """Continue from what was written to `counts` and `state_dict()["state"]`: round parameters from it.

        The parameters of a sharded optimizer are gathered: every rank calls it.
        """
        self.gather.wait()
        for i, flat in enumerate(self.flats):
            flat.steps.fill_(self.counts()["steps"])
            flat.round()
            for j in range(len(flat.local)):
                self.start_gather((i, j))
        self._start_updated()
        self.gather.wait()


def check_range(owner: str, *, below: float = math.inf, **numbers: float) -> None:
    """Raise ValueError, naming `owner`, for a number that is not in [0, `below`)."""
    for name, number in numbers.items():
        if not 0.0 <= number < below:
            raise ValueError(f"{owner}: {name} must be in [0, {below:g}), got {number}")


def has_other_ranks() -> bool:
    """Return True if other ranks may hold what this one does not."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _decayed_matrices(weight_decay: float) -> Callable[[str, Parameter], ParameterGroup]:
    matrices, vectors = ParameterGroup(weight_decay=weight_decay), ParameterGroup()
    return lambda name, param: vectors if is_vector(param) else matrices
