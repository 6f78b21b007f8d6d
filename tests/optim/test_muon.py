"""Muon: its step is torch's, and that of one process on every layout."""

from __future__ import annotations

import copy
import zlib
from functools import partial

import pytest
import torch
from marks import full
from torch import nn

from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Placement
from fastmp.nn.stages import gpt_stages
from fastmp.optim import muon
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer, main_grad
from fastmp.optim.grad_norm import clip_coefficient, global_grad_norm
from fastmp.optim.muon import Muon, is_hidden_matrix, update_cost
from fastmp.optim.named_params import named_parameters
from fastmp.optim.newton_schulz import A, B, C, orthogonalize
from fastmp.optim.optimizer import ParameterGroup
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.parallel import count_collectives, full_tensor
from fastmp.testing.ranks import run_ranks
from tools.small_models import part_of

pytestmark = pytest.mark.usefixtures("one_thread")


def plain(matrix, coefficients=(A, B, C), steps=5, eps=None):
    """Newton-Schulz of one matrix, by the paper but for `eps`, which torch adds to the norm of a zero one."""
    a, b, c = coefficients
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (16, 16), (3, 64)])
def test_matrices_become_nearly_orthogonal(shape):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    found = orthogonalize(matrices)
    torch.testing.assert_close(found, torch.stack([plain(each) for each in matrices]), rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(found)
    assert 0.5 < values.min() and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert (found * (left @ right)).sum((1, 2)).min() > 0.7 * min(shape)


@pytest.mark.parametrize("shape", [(1, 0, 3), (2, 3, 0), (0, 3, 4), (1, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_matrix_stays_as_it_is(shape, dtype):
    found = orthogonalize(torch.empty(shape, dtype=dtype))
    assert (found.shape, found.dtype) == (shape, dtype)


def test_half_precision_is_as_good_as_torchs():
    torch.manual_seed(0)
    matrix = torch.randn(96, 200, dtype=torch.float64)
    exact = plain(matrix)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, (A, B, C), 5, 1e-7)
    ours = orthogonalize(matrix.bfloat16()[None])[0]
    error, allowed = ((each.double() - exact).norm() for each in (ours, theirs))
    assert ours.dtype == torch.bfloat16 and error <= 1.1 * allowed


def test_a_matrix_of_zeros_stays_so():
    both = torch.stack([torch.zeros(3, 4), torch.ones(3, 4)])
    zero, other = orthogonalize(both)
    assert zero.count_nonzero() == 0 and torch.equal(other, orthogonalize(both[1:])[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_of_a_matrix_changes_no_bit(dtype):
    """A strongly clipped gradient has the direction of the others, and so has one near overflow."""
    torch.manual_seed(0)
    signs = torch.randint(2, (2, 5, 9)) * 2 - 1
    matrices = (signs * (1 + torch.rand(2, 5, 9))).to(dtype)  # no number leaves the range before others
    expected = orthogonalize(matrices)
    assert expected.abs().max() > 0.1
    lowest, highest = (10, 14) if dtype == torch.float16 else (100, 126)
    for exponent in range(-lowest, highest + 1, 2):
        scale = 2.0**exponent
        assert torch.equal(orthogonalize(matrices * scale), expected), exponent
    mixed = torch.stack([matrices[0] * 2.0**-lowest, matrices[1] * 2.0**highest])
    assert torch.equal(orthogonalize(mixed), expected)


def test_subnormal_matrices_have_a_direction():
    """Clipping may leave no normal number; those that are left are exact."""
    torch.manual_seed(0)
    units = torch.randint(-8, 9, (1, 4, 6)).float()
    assert torch.equal(orthogonalize(units * 2.0**-149), orthogonalize(units))


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
    groups = {chosen: [{"params": [p], **groups_of(n, p)._asdict()} for n, p in of[chosen]] for chosen in of}
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
        torch.testing.assert_close(param, named[name], rtol=0, atol=tolerance, msg=name)
    state = optimizer.state_dict()
    assert state["step"] == 10
    assert {name for name, each in state["state"].items() if "momentum" in each} == {n for n, _ in of[True]}


MODEL = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=64,
    max_seq_len=16,
    init_std=0.1,
    activation="swiglu",
    moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=24, shared_expert_ffn_hidden_size=40),
)
TABLE = "word_embedding.weight"
STEPS = 4
SKIPPED = 2  # the step whose gradient is not finite


def make(groups, *, optimizer=Muon, dtype=torch.float64, bucket_size=20_000, shard=True, **options):
    """This rank's part of the model, its gradients and optimizer."""
    torch.manual_seed(3)
    chunks = gpt_stages(MODEL, Placement(groups, dtype=dtype), vpp=1)
    slices = {"tp_group": groups.tp, "etp_group": groups.etp}
    grads = GradBuffer(
        named_parameters(chunks),
        dp_group=groups.dp_cp,
        tp_group=groups.tp,
        edp_group=groups.edp,
        shard=shard,
        bucket_size=bucket_size,
        cost=partial(update_cost, **slices) if optimizer is Muon else None,
    )
    options |= slices if optimizer is Muon else {}
    return grads, optimizer(grads, weight_decay=0.1, **options)


def whole_shape(param, groups):
    marks, shape = parallel_attributes(param), list(param.shape)
    if marks.tensor_model_parallel:
        shape[marks.partition_dim] *= group_size(groups.etp if marks.expert_parallel else groups.tp)
    if marks.expert_parallel:
        shape[0] *= group_size(groups.ep)
    return shape


def give_gradients(grads, groups, step):
    """The first data-parallel rank gets this rank's part of a gradient that depends on name and step alone.

    The other ones get zeros, so that sums are exact on any layout.
    """
    grads.zero()
    for name, param in grads.parameters.items():
        marks, shape = parallel_attributes(param), whole_shape(param, groups)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        full = torch.zeros(shape, dtype=torch.float64)
        rows = full[: MODEL.vocab_size] if name == TABLE else full  # without the padding
        rows.copy_(torch.randn(rows.shape, generator=generator, dtype=torch.float64))
        partial_sum = marks.sequence_parallel and group_rank(groups.tp) > 0
        if group_rank(groups.edp if marks.expert_parallel else groups.dp_cp) == 0 and not partial_sum:
            param.main_grad.copy_(part_of(full, param, groups))
            if step == SKIPPED:
                param.main_grad.view(-1)[0] = torch.inf
    grads.reduce()


def do_step(grads, optimizer, groups, step):
    give_gradients(grads, groups, step)
    norm = torch.tensor(torch.nan if step == SKIPPED else 1.0)
    factors = {"inv_scale": torch.tensor(0.3), "clip_coefficient": torch.tensor(0.7)}
    optimizer.step(1e-2 / (step + 1), grad_norm=norm, **factors)


def run_layout(groups, **options):
    """{name: whole parameter} after some steps, of those that this rank has a part of."""
    grads, optimizer = make(groups, **options)
    for step in range(STEPS):
        do_step(grads, optimizer, groups, step)
    assert optimizer.skipped_steps == 1 and optimizer.state_dict()["step"] == STEPS - 1
    found, parts = {}, {"etp_group": groups.etp, "ep_group": groups.ep}
    for name, param in grads.parameters.items():
        whole = full_tensor(param.detach(), param, groups.tp, **parts)
        found[name] = (whole[: MODEL.vocab_size] if name == TABLE else whole).clone()
    return found


@pytest.fixture(scope="module")
def one_process():
    return run_layout(ParallelGroups.alone())


LAYOUTS = {
    2: [{"tp": 2}],
    4: [
        {},
        {"shard": False},
        {"tp": 2},
        {"tp": 2, "ep": 2, "etp": 1},
        {"pp": 2, "ep": 2},
        {"cp": 2, "ep": 4},
    ],
    8: [
        {},
        {"tp": 4, "etp": 2},
        {"tp": 2, "pp": 2},
        {"tp": 2, "ep": 2, "pp": 2, "etp": 1},
        {"tp": 2, "ep": 2},
    ],
}


@pytest.mark.parametrize("world", [4, *full([2, 8])])
def test_every_layout_is_one_process_bit_for_bit(one_process, world):
    def rank_main(rank, world_size):
        found = []
        for layout in LAYOUTS[world]:
            sizes = {axis: size for axis, size in layout.items() if axis != "shard"}
            groups = ParallelGroups.create(RankGrid(world_size=world_size, **sizes))
            found.append(run_layout(groups, shard=layout.get("shard", True)))
        return found

    results = run_ranks(rank_main, world, timeout=120)
    for number, layout in enumerate(LAYOUTS[world]):
        seen = set()
        for found in (result[number] for result in results):
            seen |= found.keys()
            for name, param in found.items():
                assert torch.equal(param, one_process[name]), (layout, name)
        assert seen == one_process.keys()


def strongly_clipped(groups, factor):
    """{name: whole parameter} of Muon after two steps whose clip coefficient is `factor`."""
    grads, optimizer = make(groups, dtype=torch.float32)
    for step in range(2):
        give_gradients(grads, groups, step)
        optimizer.step(1e-2, clip_coefficient=torch.tensor(factor))
    parts = {"etp_group": groups.etp, "ep_group": groups.ep}
    return {
        name: full_tensor(param.detach(), param, groups.tp, **parts).clone()
        for name, param in grads.parameters.items()
        if is_hidden_matrix(name, param)
    }


@pytest.mark.parametrize("exponent", [-30, -100])
def test_strong_clipping_does_not_stop_matrices(exponent):
    """One huge gradient elsewhere makes the clip coefficient tiny: alone, and with sliced matrices."""
    expected = strongly_clipped(ParallelGroups.alone(), 1.0)
    alone = strongly_clipped(ParallelGroups.alone(), 2.0**exponent)

    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
        return strongly_clipped(groups, 2.0**exponent)

    for found in (alone, *run_ranks(rank_main, 2)):
        assert found.keys() == expected.keys()
        for name, param in found.items():
            assert torch.equal(param, expected[name]), name


def test_a_huge_gradient_of_the_embedding_leaves_the_step_of_matrices():
    """The norm clips all gradients by a billion; each matrix still moves by its RMS of about 0.2 lr."""
    steps = {}
    for size in (1.0, 1e9):
        model = make_model(torch.float32)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        grads = GradBuffer(model.named_parameters(), cost=partial(update_cost, select=select))
        optimizer = Muon(grads, lr=1e-2, weight_decay=0.0)
        grads.zero()
        model(torch.arange(7)).square().sum().backward()
        before_clip = main_grad(model[0].weight)
        before_clip.mul_(size / before_clip.norm())
        norm = global_grad_norm(grads)
        optimizer.step(grad_norm=norm, clip_coefficient=clip_coefficient(norm, 1.0))
        steps[size] = {name: p.detach() - before[name] for name, p in model.named_parameters() if p.ndim == 2}
        assert optimizer.skipped_steps == 0
    for name, step in steps[1e9].items():
        assert step.square().mean().sqrt() > 1e-3, name
        torch.testing.assert_close(step, steps[1.0][name], rtol=1e-3, atol=1e-6, msg=name)


def test_a_gpus_dtype_gives_the_bits_of_one_process(monkeypatch):
    """Updates in bfloat16, exchanged so, near those in float32."""
    wide = run_layout(ParallelGroups.alone(), dtype=torch.bfloat16)
    monkeypatch.setattr(muon, "_orthogonal_dtype", lambda main, device: torch.bfloat16)
    alone = run_layout(ParallelGroups.alone(), dtype=torch.bfloat16)

    def rank_main(rank, world_size):
        return run_layout(ParallelGroups.create(RankGrid(world_size=world_size, tp=2)), dtype=torch.bfloat16)

    for found in run_ranks(rank_main, 2):
        assert all(torch.equal(param, alone[name]) for name, param in found.items())
    for name, param in wide.items():
        torch.testing.assert_close(alone[name], param, rtol=0.02, atol=2e-3, msg=name)
    assert any(not torch.equal(alone[name], param) for name, param in wide.items())


def test_fused_matrices_are_updated_each_by_itself():
    """Against one step of plain Newton-Schulz on the matrices that attention and MLPs use."""
    groups = ParallelGroups.alone()
    grads, optimizer = make(groups, momentum=0.0)
    before = {name: p.detach().clone() for name, p in grads.parameters.items()}
    give_gradients(grads, groups, 0)
    optimizer.step(1e-2)

    d = MODEL.head_dim
    for name, param in grads.parameters.items():
        if not is_hidden_matrix(name, param):
            continue
        grad, step = param.main_grad.clone(), torch.empty_like(param)
        matrices = []
        if name.endswith("qkv.weight"):
            rows = torch.arange(len(param)).view(MODEL.kv_heads, -1).split([2 * d, d, d], 1)
            matrices = [(each.reshape(-1),) for each in rows]
        elif "experts.fc" in name:
            halves = torch.arange(param.shape[1]).chunk(2 if name.endswith("fc1") else 1)
            matrices = [(expert, rows) for expert in range(len(param)) for rows in halves]
        else:
            matrices = [(rows,) for rows in torch.arange(len(param)).chunk(2 if ".up." in name else 1)]
        for index in matrices:
            found = plain(grad[index])
            step[index] = 0.2 * max(found.shape) ** 0.5 * found
        expected = before[name] * (1 - 1e-3) - 1e-2 * step
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-12, msg=name)


def test_exchanges_are_four_collectives_a_step_at_most():
    """Two for all dense matrices, two for experts; one where the same ranks hold slices of both.

    Matrices have buffers of their own, here one bucket more than AdamW's.
    """

    def rank_main(rank, world_size):
        found = []
        for layout in ({"tp": 2}, {"tp": 2, "etp": 1, "ep": 2}, {"tp": 4, "etp": 2}):
            groups = ParallelGroups.create(RankGrid(world_size=world_size, **layout))
            counts = []
            for optimizer in (AdamW, Muon):
                grads, made = make(groups, optimizer=optimizer, bucket_size=1 << 20)
                with count_collectives() as seen:
                    grads.reduce()
                    made.step()
                counts.append(seen.counts)
            found.append({name: n - counts[0].get(name, 0) for name, n in counts[1].items()})
        return found

    for found in run_ranks(rank_main, 4):
        one_bucket = {"reduce_scatter": 1, "all_gather": 1}
        assert found[0] == found[1] == {"all_to_all": 2, "all_reduce": 0, **one_bucket}
        assert found[2] == {"all_to_all": 4, "all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}


def bits(grads, optimizer):
    state = optimizer.state_dict()["state"]
    params = {name: param.detach().clone() for name, param in grads.parameters.items()}
    return params, {(n, key): t.clone() for n, each in state.items() for key, t in each.items()}


def same(left, right):
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(left, right))


@pytest.mark.parametrize("states", ["small", *full(["classic"])])
def test_state_continues_bitwise_and_a_skipped_step_changes_nothing(states):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
        options = {"dtype": torch.bfloat16, "states": states}
        (grads, straight), (first_grads, first), (second_grads, second) = (
            make(groups, **options) for _ in range(3)
        )
        for step in range(STEPS):
            before = bits(grads, straight)
            do_step(grads, straight, groups, step)
            assert same(before, bits(grads, straight)) is (step == SKIPPED)
        for step in range(2):
            do_step(first_grads, first, groups, step)
        for name, param in first_grads.parameters.items():
            second_grads.parameters[name].data.copy_(param)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for step in range(2, STEPS):
            do_step(second_grads, second, groups, step)
        assert same(bits(grads, straight), bits(second_grads, second))
        name = next(name for name, each in straight.state_dict()["state"].items() if "momentum" in each)
        state = straight.state_dict()["state"][name]
        bytes_of = sum(tensor.nbytes for tensor in state.values()) / state["momentum"].numel()
        master = straight.master(name)
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), grads.parameters[name])
        return bytes_of

    assert run_ranks(rank_main, 4) == [8.0 if states == "classic" else 6.0] * 4


def test_small_masters_are_those_of_classic_states():
    masters = []
    for states in ("classic", "small"):
        groups = ParallelGroups.alone()
        grads, optimizer = make(groups, dtype=torch.bfloat16, states=states)
        for step in range(STEPS):
            do_step(grads, optimizer, groups, step)
        hidden = [name for name, param in grads.parameters.items() if is_hidden_matrix(name, param)]
        masters.append({name: optimizer.master(name) for name in hidden})
    classic, small = masters
    assert all(torch.equal(small[name], master) for name, master in classic.items())


def test_a_rank_may_train_vectors_alone():
    def rank_main(rank, world):
        stage = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        if rank == 0:
            stage[1].weight.requires_grad_(False)
        params = [(name, param) for name, param in stage.named_parameters() if param.requires_grad]
        grads = GradBuffer(params, cost=update_cost)
        optimizer = Muon(grads, lr=0.1)
        stage(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
        grads.reduce()
        before = {name: param.detach().clone() for name, param in params}
        optimizer.step()
        moments = {name: sorted(entries) for name, entries in optimizer.state_dict()["state"].items()}
        return moments, all(not torch.equal(param, before[name]) for name, param in params)

    vectors, everything = run_ranks(rank_main, 2)
    adamw = ["exp_avg", "exp_avg_sq"]
    assert vectors == ({"0.weight": adamw, "0.bias": adamw, "1.bias": adamw}, True)
    assert everything == ({**vectors[0], "1.weight": ["momentum"]}, True)


def test_what_muon_updates_by_default():
    _, optimizer = make(ParallelGroups.alone())
    state = optimizer.state_dict()["state"]
    first = {name for name in state if name.startswith("layers.0.") and "momentum" in state[name]}
    assert {name.removeprefix("layers.0.") for name in first} == {
        *("attention.qkv.weight", "attention.proj.weight", "moe.experts.fc1", "moe.experts.fc2"),
        *("moe.shared_experts.mlp.up.weight", "moe.shared_experts.mlp.down.weight"),
    }
    assert all("momentum" not in each for name, each in state.items() if not name.startswith("layers."))
    names = {
        "h.0.attn.c_attn.weight": True,
        "layers.0.mlp.gate_proj.weight": True,
        **dict.fromkeys(
            ("model.embed_tokens.weight", "lm_head.weight", "wpe.weight", "mlp.gate.weight"), False
        ),
    }
    matrix = nn.Parameter(torch.zeros(3, 4))
    assert {name: is_hidden_matrix(name, matrix) for name in names} == names
    assert not is_hidden_matrix("up.weight", nn.Parameter(torch.zeros(1, 4)))
    assert not is_hidden_matrix("conv.weight", nn.Parameter(torch.zeros(3, 4, 5)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Muon(GradBuffer(nn.Linear(3, 4).named_parameters())), "Muon: no parameter has a cost; make"),
        (
            lambda: GradBuffer(nn.Conv1d(3, 4, 5).named_parameters(), cost=partial(update_cost, select=any_)),
            r"Muon: parameter 'weight' of shape \(4, 3, 5\) is no matrix",
        ),
        (lambda: update_cost("w", fused(4, (2, 1))), r"Muon: parameter 'w' has 4 rows, which its fused_rows"),
        (
            lambda: Muon(float64_grads(), states="small"),
            "Muon: small states need parameters in bfloat16 or float32, but 'weight' is torch.float64",
        ),
    ],
)
def test_what_cannot_be_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def float64_grads():
    return GradBuffer(nn.Linear(3, 4).double().named_parameters(), cost=update_cost)


def any_(name, param):
    return True


def fused(rows, fused_rows):
    param = nn.Parameter(torch.zeros(rows, 3))
    param.fused_rows = fused_rows
    return param
