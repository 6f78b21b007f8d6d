"""A sharded optimizer: ranks that share its state are one optimizer, and parameters are there when used."""

from __future__ import annotations

import copy
import io
import math
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from marks import full
from torch import nn

from fastmp.distributed.collectives import reduce_scatter_
from fastmp.optim import grad_buffers as grads_module
from fastmp.optim import param_all_gather as gather_module
from fastmp.optim.adamw import AdamW
from fastmp.optim.flat_layout import Bucket, BucketLayout
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.grad_norm import clip_coefficient, global_grad_norm
from fastmp.optim.optimizer import ParameterGroup
from fastmp.testing.parallel import late_gathers
from fastmp.testing.ranks import run_ranks

STEPS, MICROBATCHES, ROWS = 20, 2, 12


class Model(nn.Module):
    """Uses its layers in another order than it has them, one twice, and a table without its module."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(10, 3, dtype=dtype)
        self.table = nn.Embedding(9, 10, dtype=dtype)
        self.twice = nn.Linear(10, 10, dtype=dtype)
        self.norm = nn.LayerNorm(10, dtype=dtype)
        self.first = nn.Linear(10, 10, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(10, dtype=dtype))

    def forward(self, x):
        x = self.norm(self.first(x) * self.scale + self.table.weight.mean(0))
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def inputs(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(MICROBATCHES, ROWS, 10, dtype=torch.float64, generator=generator)


def groups_of(name, param):
    """Three groups: matrices, vectors, and one layer that learns slowly."""
    if name.startswith("first"):
        return ParameterGroup(lr=0.5, weight_decay=0.2)
    return ParameterGroup(weight_decay=0.1 if param.ndim > 1 else 0.0)


def lr(step):
    return 1e-2 / (step + 1)


@pytest.fixture(scope="module")
def plain():
    """Parameters after STEPS steps of torch's AdamW, and all norms."""
    model, norms = Model(), []
    named = dict(model.named_parameters())
    members = [{"params": [p], **groups_of(name, p)._asdict()} for name, p in named.items()]
    factors = [group["lr"] for group in members]
    optimizer = torch.optim.AdamW(members, betas=(0.9, 0.95))
    for step in range(STEPS):
        for microbatch in inputs(step):
            model(microbatch).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 20.0).item())
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = factor * lr(step)
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) < 20 < max(norms), "some steps are clipped"
    return {name: p.detach() for name, p in named.items()}, norms


def train(rank, world, *, overlap=True, bucket_size=100, shard=True, steps=STEPS, model=None, run=None):
    """Parameters and norms of this rank. run: what is called in place of the model."""
    model, group = model or Model(), dist.group.WORLD if world > 1 else None
    run = model if run is None else run
    grads = GradBuffer(
        model.named_parameters(), dp_group=group, shard=shard, bucket_size=bucket_size, overlap=overlap
    )
    optimizer, norms = AdamW(grads, group=groups_of), []
    if overlap:
        optimizer.gather.attach([run])
    for step in range(steps):
        grads.zero()
        for microbatch in inputs(step):
            run(microbatch.chunk(world)[rank]).square().sum().backward()
        grads.reduce()
        norm = global_grad_norm(grads, world_group=group)
        optimizer.step(lr(step), grad_norm=norm, clip_coefficient=clip_coefficient(norm, 20.0))
        norms.append(norm.item())
    optimizer.gather.wait()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def test_where_nothing_is_gathered_no_module_waits():
    model = Model()
    optimizer = AdamW(GradBuffer(model.named_parameters()))
    optimizer.gather.attach([model])
    assert not any(module._forward_pre_hooks for module in model.modules())


def close(found, expected, tolerance):
    for name, param in expected.items():
        torch.testing.assert_close(found[name], param, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world", [1, 2, *full([3, 4])])
def test_twenty_steps_are_those_of_torch(plain, world, overlap):
    results = (
        [train(0, 1, overlap=overlap)] if world == 1 else run_ranks(partial(train, overlap=overlap), world)
    )
    for params, norms in results:
        close(params, plain[0], 1e-10)
        assert norms == results[0][1], "bits differ between ranks"
        assert norms == pytest.approx(plain[1], abs=1e-10)
        assert all(torch.equal(params[name], results[0][0][name]) for name in params)


class Fused(nn.Module):
    """The weight of its last layer is used by a loss, behind the norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(10, 10, dtype=torch.float64), nn.LayerNorm(10, dtype=torch.float64)
        self.last = nn.Linear(10, 3, bias=False, dtype=torch.float64)
        self.norm.prefetch_next = (self.last,)

    def forward(self, x):
        return self.norm(torch.tanh(self.first(x))) @ self.last.weight.t()


def test_a_module_that_nobody_calls_is_waited_for_by_the_one_before_it():
    def steps(rank, world, group=None):
        model = Fused()
        grads = GradBuffer(model.named_parameters(), dp_group=group, shard=True, bucket_size=1, overlap=True)
        optimizer, pending = AdamW(grads), []
        optimizer.gather.attach([model])
        for step in range(3):
            grads.zero()
            model(inputs(step)[0].chunk(world)[rank]).square().sum().backward()
            grads.reduce()
            optimizer.step(1e-2)
            pending.append({name for name, param in model.named_parameters() if param.isnan().any()})
        optimizer.gather.wait()
        return {name: p.detach() for name, p in model.named_parameters()}, pending

    @late_gathers()
    def rank_main(rank, world):
        return steps(rank, world, dist.group.WORLD)

    expected, _ = steps(0, 1)
    results = run_ranks(rank_main, 2)
    for params, _ in results:
        close(params, expected, 1e-10)
    for pending in zip(*(pending for _, pending in results), strict=True):
        assert set.union(*pending) == set(expected), "something is waited for at once"


def test_parameters_are_never_used_before_they_are_there(plain):
    rank_main = late_gathers()(train)

    for params, _ in run_ranks(rank_main, 2):
        close(params, plain[0], 1e-10)


def test_a_late_wait_is_seen(monkeypatch):
    """What the test above finds where hooks do not wait."""

    def without_waiting(self, module, own):
        self._uncalled.pop(module, None)

    @late_gathers()
    def rank_main(rank, world):
        monkeypatch.setattr(gather_module.ParameterGather, "before", without_waiting)
        return train(rank, world, steps=2)[1]

    for first, second in run_ranks(rank_main, 2):
        assert math.isfinite(first) and math.isnan(second)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ((Bucket(0, 64, ("b",)), Bucket(64, 192, ("a",))), "'b' lies at 0 to 100, .* its bucket, 0 to 64"),
        ((Bucket(0, 256, ("a", "b")),), "'b' lies at 0 to 100, behind another"),
        (
            (Bucket(0, 112, ("b",)), Bucket(128, 256, ("a",))),
            "bucket 1 lies at 128 to 256; it must begin at 112",
        ),
        ((Bucket(0, 201, ("b", "a")),), "bucket 0 lies at 0 to 201; .* 2 ranks must divide it"),
    ],
)
def test_a_broken_boundary_of_a_bucket_is_refused(buckets, message):
    with pytest.raises(ValueError, match=message):
        BucketLayout(2, buckets, {"b": (0, 100), "a": (128, 200)})


BYTES = {
    # dtype of parameters, of gradients, states: bytes on every rank, bytes divided by their number
    ("float32", "float32", "classic"): (8, 8),
    ("bfloat16", "float32", "classic"): (6, 12),
    ("bfloat16", "bfloat16", "classic"): (4, 12),
    ("bfloat16", "bfloat16", "small"): (4, 6),
}


@pytest.mark.parametrize("world", [1, 2, *full([4])])
def test_bytes_that_a_rank_holds(world):
    """Measured: what is allocated for a parameter, its gradient and its state, all buffers together."""

    def rank_main(rank, world_size):
        found = []
        for dtype, grad_dtype, states in BYTES:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(256, 256, dtype=getattr(torch, dtype)) for _ in range(4)))
            grads = GradBuffer(
                model.named_parameters(),
                dp_group=dist.group.WORLD if world_size > 1 else None,
                shard=True,
                grad_dtype=getattr(torch, grad_dtype),
            )
            optimizer = AdamW(grads, states=states)
            state = [t for entries in optimizer.state_dict()["state"].values() for t in entries.values()]
            tensors = [*model.parameters(), *(p.main_grad for p in model.parameters()), *state]
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
            parameters = sum(p.numel() for p in model.parameters())
            found.append(sum(storage.nbytes() for storage in storages.values()) / parameters)
        return found

    results = [rank_main(0, 1)] if world == 1 else run_ranks(rank_main, world)
    for found in results:
        assert found == pytest.approx(
            [fixed + divided / world for fixed, divided in BYTES.values()], rel=1e-3
        )


def test_a_norm_of_parts_is_refused():
    def rank_main(rank, world):
        grads = GradBuffer(Model().named_parameters(), dp_group=dist.group.WORLD, shard=True)
        with pytest.raises(
            ValueError, match=r"gradients are sharded, .* pass the group of all ranks as world_group"
        ):
            global_grad_norm(grads)

    run_ranks(rank_main, 2)


class Two(nn.Module):
    """Two layers; in evaluation, or `functional`, the second one is used without being called."""

    def __init__(self, functional=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(16, 16, dtype=torch.float64) for _ in range(2))
        self.functional = functional

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.functional:
            return nn.functional.linear(x, self.second.weight, self.second.bias)
        return self.second(x)


def make_two(model, **options):
    options = {"dp_group": dist.group.WORLD, "shard": True, "bucket_size": 64, **options}
    grads = GradBuffer(model.named_parameters(), **options)
    optimizer = AdamW(grads, lr=1e-2)
    optimizer.gather.attach([model])
    return grads, optimizer


def step_of_two(model, grads, optimizer, step=0):
    grads.zero()
    loss = model(inputs(step).flatten()[:160].reshape(10, 16)).square().sum()
    loss.backward()
    grads.reduce()
    optimizer.step()
    return loss.item()


def test_hooks_that_were_there_before_find_the_parameters_there():
    """nn.utils.weight_norm computes a weight in a hook before the forward."""

    def rank_main(rank, world):
        losses = []
        for gathers in (nullcontext(), late_gathers()):
            model = Two()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.weight_norm(model.second)
            made = make_two(model)
            with gathers:
                losses.append([step_of_two(model, *made, step) for step in range(4)])
        return losses

    for expected, late in run_ranks(rank_main, 2):
        assert late == expected


def test_what_evaluation_calls_is_not_what_training_calls():
    @late_gathers()
    def rank_main(rank, world):
        model = Two()
        made = make_two(model)
        with torch.no_grad():
            model(torch.zeros(1, 16, dtype=torch.float64))
        model.functional = True
        return [step_of_two(model, *made, step) for step in range(3)]

    for losses in run_ranks(rank_main, 2):
        assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("reader", ["state dict", "of a submodule", "loaded", "optimizer loaded"])
def test_reading_and_loading_states_waits(reader):
    @late_gathers()
    def rank_main(rank, world):
        model = Two()
        _, optimizer = made = make_two(model)
        for step in range(2):
            step_of_two(model, *made, step)
        pending = any(p.isnan().any() for p in model.parameters())
        found = model
        if reader == "state dict":
            found = model.state_dict()
        elif reader == "of a submodule":
            found = model.second.state_dict()
        elif reader == "loaded":
            model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})
            optimizer.gather.wait()
            assert all(bool((p == 1).all()) for p in model.parameters())
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        tensors = found.values() if isinstance(found, dict) else found.parameters()
        return pending, any(bool(tensor.isnan().any()) for tensor in tensors)

    assert run_ranks(rank_main, 2) == [(True, False)] * 2


def test_a_step_that_fails_leaves_nothing_to_the_next(monkeypatch):
    """Its first bucket is on its way when backward fails; it must not arrive in the next step's gradients."""

    link = []  # what is on its way, which arrives before anything that is sent later

    def slow(x, group, overlap=False):
        for wait in list(link):
            wait()
        kept, part = x.clone(), x.numel() // group.size()

        def wait():
            if wait in link:
                link.remove(wait)
                reduce_scatter_(kept, group)
                x[group.rank() * part :][:part] = kept[group.rank() * part :][:part]

        link.append(wait)
        return SimpleNamespace(wait=wait)

    def rank_main(rank, world):
        monkeypatch.setattr(grads_module, "reduce_scatter_", slow)
        model, plain = Two(), Two()
        grads, optimizer = make_two(model, overlap=True)
        step_of_two(model, grads, optimizer)
        plain.load_state_dict(model.state_dict())
        grads.zero()
        handle = model.first.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(3, 16, dtype=torch.float64)).sum().backward()
        handle.remove()
        assert grads._works, "a bucket was sent"
        x = inputs(1).flatten()[:160].reshape(10, 16)
        grads.zero()
        model(x).square().sum().backward()
        grads.reduce()
        (world * plain(x).square().sum()).backward()
        for name, own in grads.flats[0].own.items():
            expected = plain.get_parameter(name).grad.flatten()[
                slice(*grads.flats[0].pieces[name].param_range)
            ]
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
        return True

    assert run_ranks(rank_main, 2) == [True, True]


def test_a_model_with_hooks_can_be_pickled_and_copied():
    def rank_main(rank, world):
        model = Two()
        made = make_two(model)
        step_of_two(model, *made)
        made[1].gather.wait()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        x = torch.ones(2, 16, dtype=torch.float64)
        for twin in (torch.load(buffer, weights_only=False), copy.deepcopy(model)):
            assert torch.equal(twin(x), model(x))
        return True

    assert run_ranks(rank_main, 2) == [True, True]


def test_state_continues_bitwise_where_it_is_sharded():
    world = 2

    def steps(model, grads, optimizer, numbers, rank):
        for step in numbers:
            grads.zero()
            model(inputs(step)[0].chunk(world)[rank].bfloat16()).square().sum().backward()
            grads.reduce()
            optimizer.step(1e-2)

    def make():
        model = Model(torch.bfloat16)
        grads = GradBuffer(model.named_parameters(), dp_group=dist.group.WORLD, shard=True, bucket_size=100)
        return model, grads, AdamW(grads)

    def rank_main(rank, _):
        straight, first, second = make(), make(), make()
        steps(*straight, range(4), rank)
        steps(*first, range(2), rank)
        second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
        steps(*second, range(2, 4), rank)
        for p, q in zip(straight[0].parameters(), second[0].parameters(), strict=True):
            assert torch.equal(p, q)
        optimizer = straight[2]
        return sum(optimizer.master(name).numel() for name in optimizer.state_dict()["state"])

    assert sum(run_ranks(rank_main, world)) == sum(p.numel() for p in Model().parameters())


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, *full([torch.float32])])
def test_small_states_do_not_depend_on_who_updates(grad_dtype):
    """Random bits go by the place of an element: sharded, replicated, every bit is the same."""

    def rank_main(rank, world):
        found = []
        for shard in (True, False):
            model, group = Model(torch.bfloat16), dist.group.WORLD
            options = {"dp_group": group, "shard": shard, "bucket_size": 100, "grad_dtype": grad_dtype}
            grads = GradBuffer(model.named_parameters(), **options)
            optimizer = AdamW(grads, group=groups_of, states="small", seed=3)
            for step in range(6):
                grads.zero()
                for microbatch in inputs(step).bfloat16():
                    model(microbatch.chunk(world)[rank]).square().sum().backward()
                grads.reduce()
                optimizer.step(lr(step))
            found.append({name: p.detach() for name, p in model.named_parameters()})
        return found

    for sharded, replicated in run_ranks(rank_main, 2):
        assert all(torch.equal(sharded[name], param) for name, param in replicated.items())


def test_small_states_train_like_classic_ones():
    """Over 100 steps in bfloat16, the last losses within what another order of rounding gives."""

    def last_losses(states, grad_dtype, seed=0):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).bfloat16()
        grads = GradBuffer(model.named_parameters(), grad_dtype=grad_dtype)
        optimizer, losses = AdamW(grads, states=states, seed=seed, betas=(0.9, 0.999)), []
        for step in range(100):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(64, 16, generator=generator).bfloat16()
            grads.zero()
            loss = (model(x).float() - x.float().roll(1, 1).abs()).square().mean()
            loss.backward()
            optimizer.step(3e-3)
            losses.append(loss.item())
        assert losses[0] > 1.0
        return sum(losses[-20:]) / 20

    classic = last_losses("classic", torch.float32)
    assert classic < 0.8
    assert last_losses("small", torch.bfloat16) == pytest.approx(classic, rel=0.05)


@pytest.mark.parametrize("how", ["in place", *full(["returned"])])
def test_compiled_modules_wait_outside_of_what_is_compiled(plain, how):
    """One graph and no recompilation: no hook is compiled, and no parameter used too early."""

    @late_gathers()
    def rank_main(rank, world):
        model = Model()
        run = torch.compile(model, backend="eager", fullgraph=True) if how == "returned" else model
        if how == "in place":
            model.compile(backend="eager", fullgraph=True)
        params, _ = train(rank, world, model=model, run=run)
        return params

    for params in run_ranks(rank_main, 2):
        close(params, plain[0], 1e-10)
