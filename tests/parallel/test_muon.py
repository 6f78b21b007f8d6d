"""Muon: its step is torch's, and that of one process on every layout."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from marks import full
from torch import nn

from fastmp.parallel.grads import GradBuffer
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.layers import ParallelAttributes
from fastmp.parallel.muon import Muon, is_hidden_matrix, update_cost
from fastmp.parallel.newton_schulz import A, B, C, orthogonalize
from fastmp.parallel.optimizer import ParameterGroup
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def plain(matrix, coefficients=(A, B, C), steps=5, eps=1e-7):
    """Newton-Schulz of one matrix, by the paper."""
    a, b, c = coefficients
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(x.norm().item(), eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (16, 16), (3, 64)])
def test_matrices_become_nearly_orthogonal(shape):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    found = orthogonalize(matrices)
    torch.testing.assert_close(
        found, torch.stack([plain(each) for each in matrices]), rtol=0, atol=1e-12
    )
    values = torch.linalg.svdvals(found)
    assert 0.5 < values.min() and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert (found * (left @ right)).sum((1, 2)).min() > 0.7 * min(shape)


def test_half_precision_is_as_good_as_torchs():
    torch.manual_seed(0)
    matrix = torch.randn(96, 200, dtype=torch.float64)
    exact = plain(matrix)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, (A, B, C), 5, 1e-7)
    ours = orthogonalize(matrix.bfloat16()[None])[0]
    error, allowed = ((each.double() - exact).norm() for each in (ours, theirs))
    assert ours.dtype == torch.bfloat16 and error <= 1.1 * allowed


def test_a_matrix_of_zeros_stays_so():
    assert orthogonalize(torch.zeros(2, 3, 4)).count_nonzero() == 0


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 6), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    ).to(dtype)


def groups_of(name, param):
    return ParameterGroup(0.5, 0.2) if name.startswith("1") else ParameterGroup(1.0, 0.1)


def select(name, param):
    return param.ndim == 2 and not name.startswith("0")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_ten_steps_are_those_of_torch(monkeypatch, dtype, tolerance):
    """torch orthogonalises in bfloat16 whatever the dtype: here it is given the same sum of products."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", plain)
    ours, theirs = make_model(dtype), make_model(dtype)
    named = dict(theirs.named_parameters())
    of = {chosen: [(n, p) for n, p in named.items() if select(n, p) is chosen] for chosen in (True, False)}
    groups = {
        chosen: [{"params": [p], **groups_of(n, p)._asdict()} for n, p in of[chosen]] for chosen in of
    }
    factors = {chosen: [group["lr"] for group in groups[chosen]] for chosen in of}
    plain_optimizers = {
        True: torch.optim.Muon(groups[True], adjust_lr_fn="match_rms_adamw"),
        False: torch.optim.AdamW(groups[False], betas=(0.9, 0.95)),
    }
    grads = GradBuffer(ours.named_parameters(), cost=partial(update_cost, select=select))
    optimizer = Muon(grads, group=groups_of)
    for step in range(10):
        ids, lr = torch.randint(7, (5,)), torch.tensor(1e-2 / (step + 1), dtype=dtype)
        grads.zero()
        (ours(ids).square().sum() * 8).backward()
        optimizer.step(lr, inv_scale=torch.tensor(0.25), clip_coefficient=torch.tensor(0.5))
        theirs(ids).square().sum().backward()
        for chosen, each in plain_optimizers.items():
            for group, factor in zip(each.param_groups, factors[chosen], strict=True):
                group["lr"] = lr.item() * factor
            each.step()
            each.zero_grad()
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param, named[name], rtol=0, atol=tolerance, msg=lambda text: f'{name}: {text}')
    state = optimizer.state_dict()
    assert state["step"] == 10
    assert {name for name, each in state["state"].items() if "momentum" in each} == {n for n, _ in of[True]}
