"""The optimizer step: equal to torch's own, the norm over layouts, and steps that must not happen."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
import torch.distributed as dist
from dispatch_modes import CalledOps
from marks import full
from optim_tools import Tied, make_model
from torch import nn

from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.grad_norm import clip_coefficient, global_grad_norm
from fastmp.optim.optimizer import ParameterGroup
from fastmp.testing.ranks import run_ranks


def clone_state(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def assert_state_equal(left, right):
    assert left["step"] == right["step"]
    assert left["state"].keys() == right["state"].keys()
    for name, entries in left["state"].items():
        assert entries.keys() == right["state"][name].keys()
        for key, tensor in entries.items():
            assert torch.equal(tensor, right["state"][name][key]), (name, key)


def test_parameters_that_are_not_contiguous():
    """Transposed and channels-last: gradient, state and parameter must agree on where an element lies."""
    torch.manual_seed(0)
    ours = {
        "transposed": nn.Parameter(torch.randn(3, 5).t()),
        "channels last": nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)),
    }
    theirs = {
        name: nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))
        for name, p in ours.items()
    }
    optimizer = AdamW(GradBuffer(ours.items()), lr=1e-2, weight_decay=0.0)
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for params in (ours, theirs):
            sum(
                (p * torch.arange(p.numel()).reshape(p.shape)).square().sum() for p in params.values()
            ).backward()
        optimizer.step()
        reference.step()
        reference.zero_grad()
        for param in ours.values():
            param.main_grad.zero_()
    for name, param in ours.items():
        assert not param.is_contiguous()
        torch.testing.assert_close(param, theirs[name], msg=name)
    with pytest.raises(ValueError, match="leaves gaps in memory"):
        GradBuffer([("every second", nn.Parameter(torch.zeros(4, 4)[:, ::2]))])


def test_decay_is_decoupled_and_spares_one_dimensional_parameters():
    model = make_model()
    grads = GradBuffer(model.named_parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    AdamW(grads, lr=0.5, weight_decay=0.1).step()
    for param in model.parameters():
        assert param.unique().tolist() == [0.95 if param.ndim > 1 else 1.0]


def test_bfloat16_parameters_follow_float32_masters():
    param = nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16))
    optimizer = AdamW(GradBuffer([("w", param)]), lr=1e-4, weight_decay=0.0)
    for _ in range(100):  # each update is 1e-4, far less than bfloat16 resolves near one
        param.main_grad.fill_(1.0)
        optimizer.step()
    master = optimizer.master("w")
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((2, 4), 0.99), rtol=0, atol=1e-5)
    assert torch.equal(param, master.bfloat16())


def test_a_step_is_one_launch_for_each_bucket():
    for dtypes in ((torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32, torch.float64)):
        for bucket_size, buckets in ((1000, 1), (64, 6)):
            model = nn.ModuleList(make_model(dtype) for dtype in dtypes * 2)
            optimizer = AdamW(GradBuffer(model.named_parameters(), bucket_size=bucket_size))
            for _ in range(2):
                with CalledOps() as seen:
                    optimizer.step(grad_norm=torch.tensor(1.0), clip_coefficient=torch.tensor(0.5))
                assert seen.names == ["adamw_"] * (buckets * len(dtypes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_in_the_kernel_is_scaled_before(dtype):
    results = []
    for fused in (True, False):
        model = make_model(dtype)
        grads = GradBuffer(model.named_parameters())
        optimizer = AdamW(grads, lr=1e-2)
        for step in range(4):
            grads.zero()
            torch.manual_seed(step)
            model(torch.randn(4, 6, dtype=dtype)).square().sum().backward()
            factors = {"inv_scale": torch.tensor(0.125), "clip_coefficient": torch.tensor(0.5)}
            if not fused:
                grads.flats[0].grad.mul_(0.0625)
                factors = {}
            optimizer.step(torch.tensor(1e-2) if fused else None, **factors)
        results.append({name: optimizer.master(name) for name in optimizer.parameters})
    for name, master in results[0].items():
        torch.testing.assert_close(master, results[1][name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_move_into_a_flat_buffer_and_stay_what_they_are(dtype):
    model = Tied().to(dtype)
    weight, before, tokens = model.output.weight, model.output.weight.detach().clone(), torch.arange(8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outputs = compiled(tokens)
    grads = GradBuffer(model.named_parameters())
    optimizer = AdamW(grads, lr=0.1)
    assert model.output.weight is weight and model.embedding.weight is weight
    assert torch.equal(weight, before) and torch.equal(compiled(tokens), outputs)
    compiled(tokens).float().square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=0, atol=0)
    assert torch.equal(copy.deepcopy(model).output.weight, weight)


def test_state_lies_in_the_order_of_the_gradients():
    """What lets ranks share the optimizer's work by cutting all buffers alike."""
    model = make_model(torch.bfloat16)
    grads = GradBuffer(model.named_parameters())
    optimizer = AdamW(grads)
    state, first = optimizer.state_dict()["state"], "3.bias"
    for name, param in model.named_parameters():
        start = grads.flats[0].layout.ranges[name][0]
        for tensor, origin in (
            (param, model[3].bias),
            *((state[name][key], state[first][key]) for key in ("exp_avg", "exp_avg_sq", "master")),
        ):
            assert tensor.data_ptr() - origin.data_ptr() == start * tensor.element_size()


def test_a_step_is_seen_by_autograd():
    model = make_model()
    grads = GradBuffer(model.named_parameters())
    optimizer = AdamW(grads)
    loss = model(torch.randn(4, 6, dtype=torch.float64)).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_clip_coefficient():
    norm = torch.tensor([0.0, 0.5, 2.0, 8.0], dtype=torch.float64)
    assert clip_coefficient(norm, 2.0).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.25], abs=1e-6)
    assert clip_coefficient(norm, 0.0).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match=r"-1"):
        clip_coefficient(norm, -1.0)


def test_norm_counts_each_parameter_once_and_has_the_same_bits_everywhere():
    """World of 4 as tp=2, pp=2: a tp rank has half of each matrix and all of each vector."""

    def rank_main(rank, world_size):
        tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = make_model(seed=rank // 2)
        model(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)).square().sum().backward()
        full = {name: p.grad for name, p in model.named_parameters()}
        parts = {}
        for name, grad in full.items():
            part = grad.chunk(2)[rank % 2] if grad.ndim > 1 else grad
            parts[name] = part, nn.Parameter(torch.zeros_like(part))
            parts[name][1].tensor_model_parallel = grad.ndim > 1
        tied = nn.Parameter(torch.zeros(3, dtype=torch.float64))  # the first stage's, and there again
        tied.tensor_model_parallel, tied.pipeline_replica = True, rank >= 2
        parts["tied"] = torch.full_like(tied, 1.0 + rank % 2), tied
        grads = GradBuffer((name, param) for name, (_, param) in parts.items())
        for part, param in parts.values():
            param.main_grad.copy_(part)
        groups = {"tp_group": tp_groups[rank // 2], "mp_group": dist.group.WORLD}
        norm = global_grad_norm(grads, **groups)
        if tied.pipeline_replica:
            tied.main_grad[1] = math.inf
        assert not global_grad_norm(grads, **groups).isfinite()
        full = full.values()
        return norm.item().hex(), sum(g.square().sum().item() for g in full)

    results = run_ranks(rank_main, 4)
    assert len({bits for bits, _ in results}) == 1
    expected = math.sqrt(results[0][1] + results[2][1] + 3 * (1.0 + 4.0))
    assert abs(float.fromhex(results[0][0]) - expected) < 1e-10


EXPERT_GRIDS = [{"ep": 2}, {"ep": 4}, {"tp": 2, "etp": 1}, {"pp": 2, "ep": 2}, {"etp": 2}]


def test_norm_over_an_expert_grid_of_its_own():
    """Experts are spread over other ranks than dense parameters: each kind is summed over its own."""

    def whole_gradients(stages):
        """{name: (gradient of the whole model, is of experts, is sharded over tensor-parallel ranks)}"""
        kinds = {
            "matrix": ((4, 3), False, True),
            "vector": ((3,), False, False),
            "expert.matrix": ((4, 4, 3), True, True),
            "expert.vector": ((4, 5), True, False),
        }
        generator, found = torch.Generator().manual_seed(0), {}
        for stage in range(stages):
            for name, (shape, *marks) in kinds.items():
                full_grad = torch.randn(shape, generator=generator, dtype=torch.float64)
                found[f"{stage}.{name}"] = full_grad * (10 if marks[0] else 1), *marks
        return found

    def rank_main(rank, world_size):
        found = []
        for sizes in EXPERT_GRIDS:
            groups = ParallelGroups.create(RankGrid(world_size=world_size, **sizes))
            parameters, parts = {}, {}
            for name, (full_grad, experts, sharded) in whole_gradients(sizes.get("pp", 1)).items():
                if int(name[0]) != group_rank(groups.pp):
                    continue
                part, over = full_grad, groups.etp if experts else groups.tp
                if experts:
                    part = part.chunk(group_size(groups.ep))[group_rank(groups.ep)]
                if sharded:
                    part = part.chunk(group_size(over), int(experts))[group_rank(over)]
                parts[name], parameters[name] = part, nn.Parameter(torch.zeros_like(part))
                parameters[name].expert_parallel, parameters[name].tensor_model_parallel = experts, sharded
            for shard in (False, True):
                ranks = {"dp_group": groups.dp_cp, "tp_group": groups.tp, "edp_group": groups.edp}
                grads = GradBuffer(parameters.items(), **ranks, shard=shard)
                for name, param in parameters.items():
                    param.main_grad.copy_(parts[name])  # reduced: sharded ranks read their own part of it
                found.append(global_grad_norm(grads, **groups.norm).item())
                grads.remove_hooks()
            assert groups.mp is not groups.expert_mp
        return found

    results = run_ranks(rank_main, 4)
    assert all(found == results[0] for found in results)
    for sizes, *norms in zip(EXPERT_GRIDS, results[0][::2], results[0][1::2], strict=True):
        grads = [grad for grad, *_ in whole_gradients(sizes.get("pp", 1)).values()]
        expected = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        assert norms == pytest.approx([expected, expected], rel=1e-12), sizes


@pytest.mark.parametrize("layout", ["tp", "sharded", *full(["dp", "small"])])
def test_non_finite_gradient_on_one_rank_skips_the_step_on_all(layout):
    """40 injections at a random (rank, parameter, element, value), with good steps in between."""
    num_injections = 40

    def rank_main(rank, world_size):
        group = dist.group.WORLD
        dtype = torch.bfloat16 if layout == "small" else torch.float32
        model = make_model(dtype)
        for param in model.parameters():
            param.tensor_model_parallel = layout == "tp" and param.ndim > 1
        groups = {"tp_group": group} if layout == "tp" else {"dp_group": group}
        shard = layout in ("sharded", "small")
        grads = GradBuffer(model.named_parameters(), **groups, shard=shard, bucket_size=64)
        optimizer = AdamW(grads, lr=1e-2, states="small" if layout == "small" else "classic")
        choice = random.Random(7)  # the same on every rank
        tp_group = group if layout == "tp" else None
        for step in range(2 * num_injections):
            grads.zero()
            torch.manual_seed(step)
            model(torch.randn(4, 6).to(dtype)).square().sum().backward()
            injected = step % 2 == 1
            if injected:
                victim, index = choice.randrange(world_size), choice.randrange(6)
                value = choice.choice([math.nan, math.inf, -math.inf])
                param = list(model.parameters())[index]
                element = choice.randrange(param.numel())
                if rank == victim:
                    param.main_grad.view(-1)[element] = value
            grads.reduce()
            norm = global_grad_norm(grads, tp_group=tp_group, mp_group=tp_group, world_group=group)
            clip = clip_coefficient(norm, 1.0)
            before = [p.detach().clone() for p in model.parameters()]
            state = clone_state(optimizer)
            optimizer.step(grad_norm=norm, clip_coefficient=clip)
            unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert unchanged == injected, f"step {step}"
            if injected:
                assert_state_equal(state, optimizer.state_dict())
        return optimizer.skipped_steps.item(), [p.detach() for p in model.parameters()]

    results = run_ranks(rank_main, 2)
    for skipped, params in results:
        assert skipped == num_injections
        assert all(torch.equal(a, b) for a, b in zip(params, results[0][1], strict=True))


def test_states_of_torch_s_optimizer_are_read():
    """Counts as float32, as torch keeps them, and entries of one tensor a parameter."""
    plain, model = make_model(torch.float32), make_model(torch.float32)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    grads = GradBuffer(model.named_parameters())
    optimizer = AdamW(grads, lr=1e-2, weight_decay=0.0)
    for step in range(4):
        x = torch.randn(4, 6)
        reference.zero_grad()
        plain(x).square().sum().backward()
        if step == 3:
            model.load_state_dict(plain.state_dict())
            states = {name: reference.state[p] for name, p in plain.named_parameters()}
            entries = {n: {k: s[k] for k in ("exp_avg", "exp_avg_sq")} for n, s in states.items()}
            count = states["0.bias"]["step"]
            assert count.dtype == torch.float32
            optimizer.load_state_dict({"step": count, "skipped_steps": 0, "state": entries})
            grads.zero()
            model(x).square().sum().backward()
            optimizer.step()
        reference.step()
    assert optimizer.state_dict()["step"] == 4
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, r"lr must be in \[0, inf\), got -1.0"),
        ({"eps": -1e-8}, r"eps must be in \[0, inf\), got -1e-08"),
        ({"weight_decay": -1.0}, r"weight_decay must be in \[0, inf\), got -1.0"),
        ({"weight_decay": math.nan}, "weight_decay .* got nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] must be in \[0, 1\), got -0.1"),
        (
            {"group": lambda name, param: ParameterGroup(1.0, -0.5)},
            "group of '0.weight': weight_decay .* -0.5",
        ),
        ({"group": lambda name, param: ParameterGroup(-1.0)}, "group of '0.weight': lr .* got -1.0"),
    ],
)
def test_numbers_out_of_range_are_errors_as_in_torch(options, named):
    grads = GradBuffer(make_model().named_parameters())
    with pytest.raises(ValueError, match=f"AdamW: {named}"):
        AdamW(grads, **options)


def test_a_learning_rate_in_a_float64_tensor_is_the_same_number():
    found = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        model = make_model()
        grads = GradBuffer(model.named_parameters())
        optimizer = AdamW(grads, lr=lr, weight_decay=0.1)
        for param in model.parameters():
            param.main_grad.fill_(0.3)
        optimizer.step()
        found.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *found))


def test_bad_arguments_are_named():
    model = make_model()
    grads = GradBuffer(model.named_parameters())
    optimizer = AdamW(grads)
    state = clone_state(optimizer)
    state["state"]["3.bias"]["exp_avg"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"3\.bias\.exp_avg is \(3,\) here, got \(4,\)"):
        optimizer.load_state_dict(state)
    del state["state"]["3.bias"]
    with pytest.raises(ValueError, match=r"only in the optimizer \['3\.bias'\]"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="no parameters"):
        global_grad_norm(GradBuffer([]))
    with pytest.raises(ValueError, match=r"AdamW.master: there is no parameter 'nobody'"):
        optimizer.master("nobody")
    with pytest.raises(ValueError, match="AdamW: no parameters"):
        AdamW(GradBuffer([]))
    with pytest.raises(ValueError, match="states must be 'classic' or 'small', got 'tiny'"):
        AdamW(grads, states="tiny")
    with pytest.raises(
        ValueError, match=r"need parameters in bfloat16 or float32, but '3.bias' is torch.float64"
    ):
        AdamW(grads, states="small")
    model.float()
    with pytest.raises(ValueError, match=r"'3\.bias' was torch.float64 .* moved to torch.float32"):
        optimizer.step()
    memory = torch.zeros(2, 3)
    views = {"upper": memory[0], "both": memory, "twisted": memory.t()}
    halves = {name: nn.Parameter(view) for name, view in views.items()}
    with pytest.raises(ValueError, match=r"'(both' and 'upper|upper' and 'both)' share memory"):
        AdamW(GradBuffer(list(halves.items())[:2]))
