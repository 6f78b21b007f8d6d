"""Hooks of gradients (`weight.register_hook`) in training: they change what is accumulated, in graphs too."""

from __future__ import annotations

import pytest
import torch
from feature_table import FP8, FP8_GATHERED
from marks import full
from trainer_tools import factor_of, hook, hooked, make_groups, make_trainer, run

from fastmp.config import GraphConfig, ParallelConfig
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

ON = GraphConfig(enabled=True, warmup=1)
IN_FP8 = {"fp8": FP8, "config": FP8_GATHERED}


@pytest.mark.parametrize("options", [{}, IN_FP8], ids=["plain", "fp8"])
def test_hooks_change_what_is_accumulated(options):
    *_, plain = run(make_trainer(**options), 1)[:3]
    *_, changed = run(hooked(**options), 1)[:3]
    factors = {factor_of(name) for name in plain}
    assert factors == {0.0, 0.5, -2.0, None}
    for name, grad in plain.items():
        factor = factor_of(name)
        expected = grad if factor is None else factor * grad
        torch.testing.assert_close(changed[name], expected, rtol=1e-10, atol=1e-12, msg=name)


def steps_of(graphs, groups, sizes, **options):
    """All numbers of steps with hooks from the third step to the fifth: after a capture, and gone again."""
    trainer = make_trainer(groups, ParallelConfig(**sizes), graphs=graphs, **options)
    seen = []
    for step in range(8):
        if step == 3:
            handles = hook(trainer)
        if step == 5:
            for handle in handles:
                handle.remove()
        result = trainer.train_step()
        seen += [result.loss, result.grad_norm]
    return [*seen, *(p.detach().clone() for p in trainer.grads.parameters.values())], trainer.graphs


GRAPHED = [
    (1, {}, {}),
    *full(
        [
            (1, {}, IN_FP8),
            (1, {"vpp": 2, "schedule": "dualpipe_v"}, {}),
            (2, {"pp": 2, "schedule": "zero_bubble"}, {}),
            (2, {"ep": 2}, {"overlap_experts": True}),
        ]
    ),
]


@pytest.mark.parametrize(
    ("world", "sizes", "options"),
    GRAPHED,
    ids=lambda value: ",".join(map(str, value)) if type(value) is dict else "",
)
def test_a_hook_that_comes_after_the_capture_is_called(world, sizes, options):
    def rank_main(rank, world_size):
        groups = make_groups(world_size, ParallelConfig(**sizes))
        (mine, manager), (expected, _) = (steps_of(on, groups, sizes, **options) for on in (ON, None))
        assert manager.num_graphs
        assert all(map(torch.equal, mine, expected))

    if world == 1:
        rank_main(0, 1)
    else:
        run_ranks(rank_main, world, timeout=120)
