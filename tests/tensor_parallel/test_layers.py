"""Tensor-parallel layers against the undivided layer in float64: outputs, gradients, collectives, weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from marks import full
from rank_cases import in_turn
from torch import nn

from fastmp.distributed.collectives import gather_from_group
from fastmp.distributed.rng import RngTracker
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.tensor_parallel.attributes import ParallelAttributes, local_shard, parallel_attributes
from fastmp.tensor_parallel.embedding import VocabParallelEmbedding
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.tensor_parallel.linear import parallel_logits
from fastmp.testing.parallel import count_collectives, full_gradient, full_tensor
from fastmp.testing.ranks import run_ranks

S, B, H, V = 8, 3, 12, 24  # sequence, batch, hidden, vocabulary
AR, AG, RS = "all_reduce", "all_gather", "reduce_scatter"

tp_sizes = pytest.mark.parametrize("tp", [2, 4])
sequence = pytest.mark.parametrize("sp", [False, True], ids=["", "sequence-parallel"])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def mine(x, rank, tp, sp):
    """A leaf that requires grad: this rank's sequence shard of `x` if `sp`, else all of it."""
    return (x.chunk(tp)[rank] if sp else x).detach().clone().requires_grad_()


def same_weights(make, group):
    """The layer over `group` and the undivided one, from one seed, with biases that are not zero."""
    built = []
    for which in (group, None):
        torch.manual_seed(0)
        layer = make(which)
        built.append(layer)
    sharded, whole = built
    if getattr(whole, "bias", None) is not None:
        with torch.no_grad():
            whole.bias.normal_()
            marks = parallel_attributes(sharded.bias)
            sharded.bias.copy_(
                whole.bias
                if not marks.tensor_model_parallel
                else local_shard(whole.bias, 0, marks.partition_stride, sharded.tp_size, sharded.tp_rank)
            )
    return sharded, whole


def check_gradients(sharded, whole, group):
    for (name, param), reference in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        close(full_tensor(param.detach(), param, group), reference.detach())
        try:
            close(full_gradient(param, group), reference.grad)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None


def check_column(rank, tp, sp):
    group = dist.group.WORLD
    x, probe = torch.randn(S, B, H, dtype=torch.float64), torch.randn(S, B, V, dtype=torch.float64)
    for options in (
        {},
        {"bias": False},
        {"gather_output": False},
        {"gather_output": False, "stride": 3},
        {"skip_bias_add": True},
        {"skip_bias_add": True, "gather_output": False},
        {"stride": 2},
    ):
        if options.get("stride") == 3 and tp == 4:
            options = options | {"stride": 1}
        sharded, whole = same_weights(
            lambda g, o=options: ColumnParallelLinear(
                H, V, group=g, sequence_parallel=sp, dtype=torch.float64, **o
            ),
            group,
        )
        gathered = options.get("gather_output", True)
        dy = probe if gathered else local_shard(probe, 2, sharded.stride, tp, rank)

        x_part = mine(x, rank, tp, sp)
        with count_collectives() as forward:
            y = sharded(x_part)
        if options.get("skip_bias_add"):
            y, bias = y
            assert bias.shape == (y.shape[-1],)
            y = y + bias
        with count_collectives() as backward:
            y.backward(dy)

        x_full = mine(x, rank, tp, False)
        reference = whole(x_full)
        reference = reference[0] + reference[1] if options.get("skip_bias_add") else reference
        reference.backward(probe)
        close(y, reference if gathered else local_shard(reference, 2, sharded.stride, tp, rank))
        close(x_part.grad, mine(x_full.grad, rank, tp, sp))
        check_gradients(sharded, whole, group)

        gathers = gathered * (1 + options.get("skip_bias_add", False)) + sp
        assert forward.counts == ({AG: gathers} if gathers else {}), options
        assert backward.counts == ({AG: 1, RS: 1} if sp else {AR: 1}), options


@tp_sizes
def test_column(tp):
    run_ranks(in_turn, tp, check_column, [(False,), (True,)])


def check_row(rank, tp, sp):
    group = dist.group.WORLD
    x, dy = torch.randn(S, B, V, dtype=torch.float64), torch.randn(S, B, H, dtype=torch.float64)
    parallel = {"input_is_parallel": True}
    for options in (
        {},
        {"bias": False},
        {"stride": 2},
        parallel,
        parallel | {"stride": 3},
        parallel | {"skip_bias_add": True},
    ):
        if options.get("stride") == 3 and tp == 4:
            options = options | {"stride": 1}
        sharded, whole = same_weights(
            lambda g, o=options: RowParallelLinear(
                V, H, group=g, sequence_parallel=sp, dtype=torch.float64, **o
            ),
            group,
        )
        is_parallel = options.get("input_is_parallel", False)

        x_part = local_shard(x, 2, sharded.stride, tp, rank) if is_parallel else x
        x_part = x_part.clone().requires_grad_()
        with count_collectives() as forward:
            y = sharded(x_part)
        if options.get("skip_bias_add"):
            y, bias = y
            assert bias is sharded.bias
            y = y + bias
        with count_collectives() as backward:
            y.backward(mine(dy, rank, tp, sp))

        x_full = mine(x, rank, tp, False)
        reference = whole(x_full)
        reference = reference[0] + reference[1] if options.get("skip_bias_add") else reference
        reference.backward(dy)
        close(y, mine(reference, rank, tp, sp))
        close(
            x_part.grad,
            local_shard(x_full.grad, 2, sharded.stride, tp, rank) if is_parallel else x_full.grad,
        )
        check_gradients(sharded, whole, group)

        assert forward.counts == ({RS: 1} if sp else {AR: 1}), options
        gathers = sp + (not is_parallel)
        assert backward.counts == ({AG: gathers} if gathers else {}), options


@tp_sizes
def test_row(tp):
    run_ranks(in_turn, tp, check_row, [(False,), (True,)])


def check_embedding(rank, tp, sp):
    group = dist.group.WORLD
    ids, dy = torch.randint(V, (S, B)), torch.randn(S, B, H, dtype=torch.float64)
    sharded, whole = same_weights(
        lambda g: VocabParallelEmbedding(V, H, group=g, sequence_parallel=sp, dtype=torch.float64), group
    )
    with count_collectives() as forward:
        y = sharded(ids)
    with count_collectives() as backward:
        y.backward(mine(dy, rank, tp, sp))
    whole(ids).backward(dy)
    close(y, mine(whole(ids), rank, tp, sp))
    check_gradients(sharded, whole, group)
    assert forward.counts == ({RS: 1} if sp else {AR: 1})
    assert backward.counts == ({AG: 1} if sp else {})


@tp_sizes
def test_embedding(tp):
    run_ranks(in_turn, tp, check_embedding, [(False,), (True,)])


def check_mlp(rank, tp, sp):
    """Column, GeLU, row: one all-reduce each way, none between the products; then logits of a tied table."""
    group = dist.group.WORLD
    x, dy = torch.randn(S, B, H, dtype=torch.float64), torch.randn(S, B, V, dtype=torch.float64)

    def make(g):
        options = {"group": g, "sequence_parallel": sp, "dtype": torch.float64}
        model = nn.Module()
        model.column = ColumnParallelLinear(H, 4 * H, gather_output=False, **options)
        model.row = RowParallelLinear(4 * H, H, input_is_parallel=True, **options)
        model.table = VocabParallelEmbedding(V, H, **options)
        return model

    sharded, whole = same_weights(make, group)
    x_part, x_full = mine(x, rank, tp, sp), mine(x, rank, tp, False)
    with count_collectives() as forward:
        hidden = sharded.row(F.gelu(sharded.column(x_part)))
    with count_collectives() as backward:
        torch.autograd.grad(hidden.sum(), x_part, retain_graph=True)
    assert forward.counts == ({AG: 1, RS: 1} if sp else {AR: 1})
    assert backward.counts == ({AG: 2, RS: 1} if sp else {AR: 1})

    with count_collectives() as forward:
        logits = parallel_logits(hidden, sharded.table.weight, group=group, sequence_parallel=sp)
    assert forward.counts == ({AG: 1} if sp else {})
    with count_collectives() as backward:
        logits.backward(dy.chunk(tp, -1)[rank])
    assert backward.counts == ({AG: 3, RS: 2} if sp else {AR: 2})

    reference = whole.row(F.gelu(whole.column(x_full)))
    reference = parallel_logits(reference, whole.table.weight, group=None)
    reference.backward(dy)
    close(logits, reference.chunk(tp, -1)[rank])
    close(x_part.grad, mine(x_full.grad, rank, tp, sp))
    check_gradients(sharded, whole, group)


@tp_sizes
def test_mlp_and_tied_logits(tp):
    run_ranks(in_turn, tp, check_mlp, [(False,), (True,)])


def check_shapes(rank, tp):
    group = dist.group.WORLD
    column = ColumnParallelLinear(H, V, group=group, dtype=torch.float64)
    row = RowParallelLinear(V, H, group=group, dtype=torch.float64)
    for leading in ((), (5,), (2, 3, 4), (0,), (2, 0)):
        x = torch.randn(*leading, H, dtype=torch.float64, requires_grad=True)
        y = row(column(x))
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape
    x = torch.randn(B, S, H, dtype=torch.float64)
    close(row(column(x.transpose(0, 1))), row(column(x)).transpose(0, 1))  # a layout that is not contiguous


def test_any_leading_dims():
    run_ranks(check_shapes, 2)


def check_frozen(rank, tp, sp):
    """What needs no gradient costs nothing: a data input no communication, a frozen weight no kept input."""
    column = ColumnParallelLinear(H, V, group=dist.group.WORLD, sequence_parallel=sp, gather_output=False)
    x = torch.randn(S, B, H)
    with count_collectives() as seen:
        column(x).sum().backward()
    assert seen.counts == ({AG: 2} if sp else {})

    column.weight.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = column(x.requires_grad_())
    assert [tuple(t.shape) for t in kept] == [tuple(column.weight.shape)]
    column.weight.grad = None
    y.sum().backward()
    assert column.weight.grad is None and x.grad is not None


@sequence
def test_frozen_weight_and_data_input(sp):
    run_ranks(check_frozen, 2, sp)


def check_saved(rank, tp):
    """The shard of the sequence-parallel input is kept, not what was gathered."""
    column = ColumnParallelLinear(H, V, group=dist.group.WORLD, sequence_parallel=True, gather_output=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        column(torch.randn(S // tp, B, H, requires_grad=True))
    assert sorted(kept) == sorted([(S // tp, B, H), (V // tp, H)])


def test_the_gathered_input_is_not_kept():
    run_ranks(check_saved, 2)


def check_overlap(rank, tp, sp):
    """The input gradient's collective is launched before the weight gradient's product, awaited after it."""
    events = []

    def spy(module, name, event):
        function = getattr(module, name)

        def wrapped(*args, **kwargs):
            events.append(event)
            result = function(*args, **kwargs)
            if kwargs.get("async_op"):
                return Handle(event, result)
            return result

        setattr(module, name, wrapped)

    class Handle:
        def __init__(self, event, work):
            self.event, self.work = event, work

        def wait(self):
            events.append(f"{self.event} waited for")
            self.work.wait()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.mm:
                events.append("product")
            return func(*args, **(kwargs or {}))

    column = ColumnParallelLinear(H, V, group=dist.group.WORLD, sequence_parallel=sp, gather_output=False)
    y = column(torch.randn(S // tp if sp else S, B, H, requires_grad=True))
    for name in (
        "all_reduce",
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ):
        if hasattr(dist, name):
            spy(dist, name, "_".join(name.split("_")[:2]))
    with Products():
        y.sum().backward()
    return events


def test_overlap_in_the_backward():
    assert run_ranks(check_overlap, 2, False)[0] == ["product", AR, "product", f"{AR} waited for"]
    assert run_ranks(check_overlap, 2, True)[0] == [
        AG,
        "product",
        RS,
        f"{AG} waited for",
        "product",
        f"{RS} waited for",
    ]


def test_embedding_alone_does_not_mask(monkeypatch):
    table = VocabParallelEmbedding(9, 4, group=None)
    monkeypatch.setattr(torch.Tensor, "masked_fill_", None)
    monkeypatch.setattr(torch.Tensor, "masked_fill", None)
    ids = torch.tensor([2, 7, 1, 5])
    assert torch.equal(table(ids), table.weight[ids])


KINDS = {
    "column": lambda group, **o: ColumnParallelLinear(24, 48, group=group, **o),
    "column, query-key-value": lambda group, **o: ColumnParallelLinear(24, 48, group=group, stride=3, **o),
    "column, gate-up": lambda group, **o: ColumnParallelLinear(24, 48, group=group, stride=2, **o),
    "row": lambda group, **o: RowParallelLinear(48, 24, group=group, **o),
    "row, two blocks": lambda group, **o: RowParallelLinear(48, 24, group=group, stride=2, **o),
    "embedding": lambda group, **o: VocabParallelEmbedding(48, 24, group=group, **o),
}


def check_full_init(rank, tp, kind, dtype):
    torch.manual_seed(11)
    layer = KINDS[kind](dist.group.WORLD, dtype=dtype)
    after = torch.rand(1).item()
    assert torch.count_nonzero(getattr(layer, "bias", torch.zeros(1))) == 0
    return full_tensor(layer.weight.detach(), layer.weight, dist.group.WORLD).double().tolist(), after


@pytest.mark.parametrize("dtype", [torch.float32, *full([torch.bfloat16, torch.float64])], ids=str)
def test_full_initialisation_is_the_same_bits_at_every_size(dtype):
    expected = []
    for kind, make in KINDS.items():
        torch.manual_seed(11)
        whole = make(None, dtype=dtype)
        after = torch.rand(1).item()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        master = torch.empty(whole.weight.shape, dtype=wide)
        torch.manual_seed(11)
        (nn.init.normal_ if kind == "embedding" else nn.init.xavier_normal_)(master)
        assert torch.equal(whole.weight, master.to(dtype)), kind
        expected.append((whole.weight.double().tolist(), after))
    for tp in (2, 4):
        found = run_ranks(in_turn, tp, check_full_init, [(kind, dtype) for kind in KINDS])
        assert found == [expected] * tp


def check_sharded_init(rank, world_size, kind, make):
    """Two data-parallel copies of two tensor-parallel ranks: 0 1 and 2 3."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rng = RngTracker(3, tp_rank=rank % 2)
    layer = make(groups[rank // 2], init="sharded", rng=rng)
    return layer.weight.detach().tolist(), torch.rand(1).item()


LARGE = {
    "column": (lambda g, **o: ColumnParallelLinear(256, 512, group=g, **o), (2 / 768) ** 0.5),
    "row": (lambda g, **o: RowParallelLinear(512, 256, group=g, **o), (2 / 768) ** 0.5),
    "embedding": (lambda g, **o: VocabParallelEmbedding(512, 256, group=g, **o), 1.0),
}


@pytest.mark.parametrize("kind", LARGE)
def test_sharded_initialisation(kind):
    make, std = LARGE[kind]
    results = run_ranks(check_sharded_init, 4, kind, make)
    shards = [torch.tensor(weight) for weight, _ in results]
    assert torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
    assert not torch.isclose(shards[0], shards[1]).float().mean() > 0.01
    assert len({after for _, after in results}) == 1  # the default stream has not moved apart
    both = torch.cat(shards[:2]) / std
    full = torch.empty_like(both).normal_()
    for shard in (*shards[:2], both * std):
        assert shard.mean().abs() < 4 * std / shard.numel() ** 0.5
        assert abs(shard.std() / std - 1) < 4 / (2 * shard.numel()) ** 0.5
    quantiles = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])
    torch.testing.assert_close(both.quantile(quantiles), full.quantile(quantiles), rtol=0, atol=0.05)


def test_sharded_alone_draws_in_the_forked_stream():
    state = torch.get_rng_state()
    try:
        rng = RngTracker(3)
        before = torch.get_rng_state()
        layer = ColumnParallelLinear(8, 8, group=None, init="sharded", rng=rng, init_method=nn.init.uniform_)
        assert torch.equal(torch.get_rng_state(), before)
        own = torch.Generator().manual_seed(3 + 2718)
        assert torch.equal(layer.weight, torch.rand(8, 8, generator=own))
    finally:
        torch.set_rng_state(state)


def marks(layer):
    return {name: parallel_attributes(p) for name, p in layer.named_parameters()}


def check_marks(rank, tp):
    group = dist.group.WORLD
    column = ColumnParallelLinear(H, 12, group=group, stride=3, fused_rows=(1, 1), device="meta")
    row = RowParallelLinear(12, H, group=group, sequence_parallel=True, device="meta")
    table = VocabParallelEmbedding(V, H, group=group, device="meta")
    table.mark_padding(V - 1)
    model = nn.ModuleDict({"column": column, "row": row, "table": table})
    expected = {
        "column.weight": ParallelAttributes(True, 0, 3, fused_rows=(1, 1)),
        "column.bias": ParallelAttributes(True, 0, 3, fused_rows=(1, 1)),
        "row.weight": ParallelAttributes(True, 1),
        "row.bias": ParallelAttributes(sequence_parallel=True),
        "table.weight": ParallelAttributes(True, 0, num_valid_rows=V - 1),
    }
    assert marks(model) == expected
    model.to_empty(device="cpu")
    assert marks(model) == expected
    model.to(torch.bfloat16)
    assert marks(model) == expected
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    assert marks(model) == expected
    twin = copy.deepcopy(model)
    assert marks(twin) == expected
    assert twin["row"].group is group and twin["row"].weight is not row.weight
    assert twin["column"](torch.ones(2, H, dtype=torch.bfloat16)).shape == (2, 12)
    assert column.weight.partition_stride == 3 and row.bias.sequence_parallel is True


def test_marks_survive_conversion_and_copies():
    run_ranks(check_marks, 2)
    assert parallel_attributes(nn.Linear(2, 2).weight) == ParallelAttributes()


class Conv1D(nn.Module):
    """What transformers calls so: weight (in, out)."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach().t().contiguous()), linear.bias


def check_from(rank, tp):
    group = dist.group.WORLD
    torch.manual_seed(0)
    linear = nn.Linear(12, 24, dtype=torch.float64).eval()
    linear.bias.requires_grad_(False)
    x = torch.randn(5, 12, dtype=torch.float64)
    state = torch.get_rng_state()
    for cls, source, options in (
        (ColumnParallelLinear, linear, {}),
        (ColumnParallelLinear, linear, {"stride": 3}),
        (ColumnParallelLinear, Conv1D(linear), {"stride": 2}),
        (RowParallelLinear, linear, {}),
        (RowParallelLinear, Conv1D(linear), {}),
    ):
        layer = cls.from_linear(source, group=group, **options)
        close(layer(x), linear(x))
        assert layer.weight.dtype == torch.float64 and layer.weight.is_contiguous()
        assert layer.weight.requires_grad and layer.bias.requires_grad == source.bias.requires_grad
        assert layer.training == source.training
        assert layer.weight.untyped_storage().data_ptr() != source.weight.untyped_storage().data_ptr()
        assert marks(layer)["weight"].tensor_model_parallel
    layer = ColumnParallelLinear.from_linear(linear, group=group, gather_output=False, skip_bias_add=True)
    y, bias = layer(x)
    close(y + bias, linear(x).chunk(tp, -1)[rank])
    assert RowParallelLinear.from_linear(nn.Linear(4, 4, bias=False), group=group).bias is None

    embedding = nn.Embedding(V, H, dtype=torch.float64)
    ids = torch.randint(V, (3, 5))
    close(VocabParallelEmbedding.from_embedding(embedding, group=group)(ids), embedding(ids))
    embedding = nn.Embedding(V, H, padding_idx=V - 2)
    ids = torch.arange(V)
    embedding(ids).square().sum().backward()
    divided = VocabParallelEmbedding.from_embedding(embedding, group=group)
    divided(ids).square().sum().backward()
    close(full_gradient(divided.weight, group), embedding.weight.grad)
    torch.set_rng_state(state)
    ColumnParallelLinear.from_linear(linear, group=group)
    assert torch.equal(torch.get_rng_state(), state)


def test_from_existing_modules():
    run_ranks(check_from, 2)


def check_errors(rank, tp):
    group = dist.group.WORLD
    for message, make in (
        (
            "ColumnParallelLinear: output_size 5 is not divisible by the 2 ranks",
            lambda: ColumnParallelLinear(4, 5, group=group),
        ),
        (
            "ColumnParallelLinear: output_size 8 is not divisible by the 2 ranks of its group times stride 3",
            lambda: ColumnParallelLinear(4, 8, group=group, stride=3),
        ),
        (
            "RowParallelLinear: input_size 7 is not divisible by the 2 ranks",
            lambda: RowParallelLinear(7, 4, group=group),
        ),
        (
            "VocabParallelEmbedding: num_embeddings 9 is not divisible by the 2 ranks",
            lambda: VocabParallelEmbedding(9, 4, group=group),
        ),
        (
            'ColumnParallelLinear: init="sharded" needs rng=',
            lambda: ColumnParallelLinear(4, 4, group=group, init="sharded"),
        ),
        (
            "RowParallelLinear: init_method xavier_uniform_ takes its scale from the shape",
            lambda: RowParallelLinear(
                4,
                4,
                group=group,
                init="sharded",
                rng=RngTracker(0, tp_rank=rank),
                init_method=nn.init.xavier_uniform_,
            ),
        ),
        (
            'expected init "full" or "sharded", got \'half\'',
            lambda: ColumnParallelLinear(4, 4, group=group, init="half"),
        ),
        (
            "VocabParallelEmbedding: token id 24 is outside the vocabulary of 24",
            lambda: VocabParallelEmbedding(V, 4, group=group)(torch.tensor([1, 24])),
        ),
        (
            "VocabParallelEmbedding: token id -3 is outside the vocabulary of 24",
            lambda: VocabParallelEmbedding(V, 4, group=group)(torch.tensor([1, -3])),
        ),
        (
            "token id 24 is outside the vocabulary of 24",
            lambda: VocabParallelEmbedding(V, 4, group=None)(torch.tensor([24])),
        ),
        (
            "ColumnParallelLinear.from_linear: expected an nn.Linear, got LayerNorm",
            lambda: ColumnParallelLinear.from_linear(nn.LayerNorm(4), group=group),
        ),
        (
            "VocabParallelEmbedding.from_embedding: max_norm=1.0 is not supported",
            lambda: VocabParallelEmbedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0), group=group),
        ),
        (
            "reduce_scatter_sequence: dimension 0 has size 3, which a group of 2 does not divide",
            lambda: RowParallelLinear(4, 4, group=group, sequence_parallel=True)(torch.ones(3, 4)),
        ),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert message in str(caught.value)
    with pytest.raises(TypeError, match="group"):
        ColumnParallelLinear(4, 4)


def test_errors_name_both_values():
    run_ranks(check_errors, 2)


def check_compiled(rank, tp, sp, backend):
    group = dist.group.WORLD
    torch.manual_seed(0)
    options = {"group": group, "sequence_parallel": sp, "dtype": torch.float64}
    table = VocabParallelEmbedding(V, H, **options)
    column = ColumnParallelLinear(H, 4 * H, gather_output=False, **options)
    row = RowParallelLinear(4 * H, H, input_is_parallel=True, **options)
    split = RowParallelLinear(H, H, group=group, dtype=torch.float64)

    def run(ids):
        h = table(ids)
        h = h + row(F.gelu(column(h)))
        h = split(gather_from_group(h, group, 0)) if sp else split(h)
        return parallel_logits(h, table.weight, group=group)

    ids = torch.randint(V, (S, B))
    params = [p for layer in (table, column, row, split) for p in layer.parameters()]
    eager = run(ids)
    eager_grads = torch.autograd.grad(eager.square().sum(), params)
    logits = torch.compile(run, fullgraph=True, backend=backend)(ids)
    grads = torch.autograd.grad(logits.square().sum(), params)
    close(logits, eager)
    for grad, eager_grad in zip(grads, eager_grads, strict=True):
        close(grad, eager_grad)


@pytest.mark.parametrize("sp", [True, *full([False])], ids=["sequence-parallel", ""])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiles_in_one_graph(sp, backend, warm_compiler):
    run_ranks(check_compiled, 2, sp, backend, timeout=240)


def check_autocast(rank, tp, sp):
    """Under autocast the layers do what nn.Linear does: bf16 products, fp32 gradients of fp32 weights."""
    group = dist.group.WORLD
    x = torch.randn(S, B, H)
    sharded, whole = same_weights(
        lambda g: nn.Sequential(
            ColumnParallelLinear(H, V, group=g, sequence_parallel=sp, gather_output=False),
            RowParallelLinear(V, H, group=g, sequence_parallel=sp, input_is_parallel=True),
        ),
        group,
    )
    x_part, x_full = mine(x, rank, tp, sp), mine(x, rank, tp, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, reference = sharded(x_part), whole(x_full)
    assert y.dtype == reference.dtype == torch.bfloat16
    y.float().square().sum().backward()
    reference.float().square().sum().backward()
    assert x_part.grad.dtype == torch.float32
    for param, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        grad = full_gradient(param, group)
        assert grad.dtype == torch.float32
        assert (grad - expected.grad).norm() < 0.02 * expected.grad.norm()


@sequence
def test_autocast(sp):
    run_ranks(check_autocast, 2, sp)


def check_main_gradients(rank, tp, sp):
    """Two microbatches through a column and a row, the second with deferred gradients of the weights."""
    group, dtype = dist.group.WORLD, torch.float64

    def make(which):
        torch.manual_seed(0)
        options = {"group": which, "sequence_parallel": sp, "dtype": dtype}
        return nn.Sequential(
            ColumnParallelLinear(H, V, gather_output=False, **options),
            RowParallelLinear(V, H, input_is_parallel=True, **options),
        )

    sharded, whole, queue = make(group), make(None), WgradQueue()
    buffer = GradBuffer(sharded.named_parameters(), tp_group=group)
    for queued in (None, queue):
        x, dy = torch.randn(2, S, B, H, dtype=dtype)
        x_part, x_full = mine(x, rank, tp, sp), mine(x, rank, tp, False)
        with defer_wgrad(queued):
            y = sharded(x_part)
        with count_collectives() as backward:
            y.backward(mine(dy, rank, tp, sp))
            queue.run(queue.take())
        whole(x_full).backward(dy)
        close(x_part.grad, mine(x_full.grad, rank, tp, sp))
        assert backward.counts == ({AG: 2, RS: 1} if sp else {AR: 1})
        assert all(param.grad is None for param in sharded.parameters())
    buffer.reduce()
    for param, reference in zip(sharded.parameters(), whole.parameters(), strict=True):
        close(full_tensor(param.main_grad, param, group), reference.grad)


@sequence
def test_main_gradients(sp):
    run_ranks(check_main_gradients, 2, sp)


def check_narrow_main_gradients(rank, tp, sp):
    """A bfloat16 `main_grad` gets what a float32 one has after one addition, rounded; deferred, too."""
    queue, found = WgradQueue(), []
    for queued in (None, queue):
        for main in (torch.bfloat16, torch.float32):
            torch.manual_seed(0)
            layer = ColumnParallelLinear(
                H, V, group=dist.group.WORLD, sequence_parallel=sp, dtype=torch.bfloat16, gather_output=False
            )
            layer.weight.main_grad = torch.ones_like(layer.weight, dtype=main)
            x = torch.randn(S, B, H).bfloat16()
            with defer_wgrad(queued):
                y = layer(mine(x, rank, tp, sp))
            y.sum().backward()
            queue.run(queue.take())
            assert layer.weight.grad is None and layer.weight.main_grad.dtype == main
            found.append(layer.weight.main_grad)
    for narrow, wide in (found[:2], found[2:]):
        torch.testing.assert_close(narrow, wide.bfloat16(), rtol=0, atol=0)
    layer.weight.main_grad = torch.ones(V // tp, H, dtype=torch.float16)
    with pytest.raises(
        ValueError, match=r"column_linear: main_grad is torch.float16 but weight is torch.bfl"
    ):
        layer(mine(x, rank, tp, sp))


@sequence
def test_narrow_main_gradients(sp):
    run_ranks(check_narrow_main_gradients, 2, sp)
