"""Training of GPT on any layout, with and without graphs: every number of every step, to compare bits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from graph_tools import DENSE, MOE, assert_same_bits
from torch import Tensor

from fastmp.config import GPTConfig
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement, gpt_stages, sum_tied_gradients
from fastmp.nn.moe.activation_stash import ActivationStash
from fastmp.nn.moe.layer import MoELayer
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import SCHEDULES, Schedule
from fastmp.testing.parallel import count_collectives

STEPS = 20
# Vocabulary and sequence are small: what is in graphs are the layers.
SIZES = {"hidden_size": 16, "num_heads": 4, "num_layers": 4, "vocab_size": 40, "max_seq_len": 8}
DENSE_4 = replace(DENSE, **SIZES)  # tied embeddings, dropout
MOE_4 = replace(MOE, **SIZES, moe=replace(MOE.moe, expert_ffn_hidden_size=8, shared_expert_ffn_hidden_size=8))
SOME = ("attention", "router", "preprocess")


@dataclass(frozen=True)
class Layout:
    """Options of a training run: `microbatches` a step, in the order of `schedule`."""

    config: GPTConfig
    microbatches: int = 4
    vpp: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    own_buffers: bool = True
    stash: int = 0  # rows of a stash for the activations of experts


class Trained(NamedTuple):
    """Results to compare: of all steps and, at last, of every parameter."""

    numbers: list[Tensor]
    collectives: list[tuple[str, list[tuple[int, ...]]]]  # names and shapes in the last step, in order
    manager: GraphManager | None
    stash: ActivationStash | None = None


class Training:
    """A model of this rank with its buffers, optimizer and schedule; `step()` by `step()`."""

    def __init__(
        self,
        layout: Layout,
        groups: ParallelGroups,
        *,
        graphs: bool,
        **manager: Any,
    ) -> None:
        config, self.layout, self.groups = layout.config, layout, groups
        tp, pp, self.dp = groups.tp, groups.pp, groups.dp
        rng = RngTracker(1, tp_rank=group_rank(tp))
        on = Placement(groups, layout.sequence_parallel, rng=rng, dtype=torch.float64)
        self.stages = gpt_stages(config, on, vpp=layout.vpp, **layout.options)
        self.stash = None
        if layout.stash:
            split = SCHEDULES[layout.schedule].splits
            self.stash = ActivationStash(lambda balanced, capacity: layout.stash, defers_wgrad=split)
            for module in (module for stage in self.stages for module in stage.modules()):
                if isinstance(module, MoELayer):
                    module.stash = self.stash
        self.parameters = {
            f"{i}.{name}": param
            for i, stage in enumerate(self.stages)
            for name, param in stage.named_parameters()
        }
        self.grads = None
        if layout.own_buffers:
            self.grads = GradBuffer(
                self.parameters.items(), dp_group=groups.dp_cp, tp_group=groups.tp, edp_group=groups.edp
            )
            self.optimizer = AdamW(self.grads, lr=1e-2)
        else:
            self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-2)
        order = Schedule(group_size(pp), layout.microbatches, layout.vpp, None, layout.schedule).orders()
        self.pipeline = Pipeline(
            self.stages,
            order,
            group=pp,
            backward_group=groups.pp_backward,
            inputs=lambda batch: batch[0],
            loss=self._loss,
        )
        self.manager = None
        if graphs:
            self.manager = GraphManager(
                [stage.layers for stage in self.stages],
                order[group_rank(pp)],
                backend=RecordingBackend(rng),
                **manager,
            )
        self.rng, self.data = rng, torch.Generator().manual_seed(5)

    def _loss(self, hidden: Tensor, batch: tuple[Tensor, Tensor, int]) -> Tensor:
        """The microbatches weigh 1, 2, ...: a gradient that one took from another would show."""
        return self.stages[-1].token_losses(hidden, batch[1]).sum() * batch[2]

    def batches(self, number: int, sequences: int = 2) -> list[tuple[Tensor, Tensor, int]]:
        size, rank = group_size(self.dp), group_rank(self.dp)
        made = []
        for i in range(number):
            ids = torch.randint(self.layout.config.vocab_size, (sequences * size, 9), generator=self.data)
            own = ids.chunk(size)[rank]
            made.append((own[:, :-1], own[:, 1:].contiguous(), i + 1))
        return made

    def gradients(self, **options: Any) -> list[Tensor]:
        """The losses, the statistics and the gradients of one step; before it nothing lies in the stash."""
        for ring in () if self.stash is None else self.stash.rings:
            ring.fill_(torch.nan)
        for param in self.parameters.values():
            param.grad = None
        if self.grads is not None:
            self.grads.zero()
        if self.manager is not None:
            self.manager.begin_step()
        result = self.pipeline.train(self.batches(self.layout.microbatches, **options))
        if self.grads is not None:
            self.grads.reduce()
        sum_tied_gradients(self.stages, self.groups, self.grads)
        found = [getattr(param, "main_grad", param.grad) for param in self.parameters.values()]
        seen = [result.loss, result.stage_loss, *result.stats.values(), *found]
        return [each.clone() for each in seen if each is not None]

    def step(self, **options: Any) -> list[Tensor]:
        seen = self.gradients(**options)
        self.optimizer.step()
        for stage in self.stages:
            stage.eval()
        evaluated = self.pipeline.evaluate(self.batches(1))
        for stage in self.stages:
            stage.train()
        return seen if evaluated.loss is None else [*seen, evaluated.loss]


def train_layout(
    layout: Layout, groups: ParallelGroups, *, graphs: bool, steps: int = STEPS, **options: Any
) -> Trained:
    training = Training(layout, groups, graphs=graphs, **options)
    numbers = [number for _ in range(steps - 1) for number in training.step()]
    with count_collectives() as seen:
        numbers += training.step()
    numbers += [param.detach().clone() for param in training.parameters.values()]
    collectives = [call for call in seen.calls if call[0] not in ("send", "recv")]
    return Trained(numbers, collectives, training.manager, training.stash)


def assert_same_layout(graphed: Trained, eager: Trained, *, in_order: bool = True) -> None:
    """Compare two results of `train_layout`. in_order: also the collectives, one after the other."""
    assert not in_order or graphed.collectives == eager.collectives
    assert_same_bits(graphed.numbers, eager.numbers)
