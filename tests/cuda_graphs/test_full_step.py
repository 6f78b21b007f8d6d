"""A function as one graph: eager's bits, and one error for what it cannot hold or would skip."""

from __future__ import annotations

import pytest
import torch
from marks import full
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.explanation.report import explain
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.distributed.rng import RngTracker
from fastmp.nn import LayerChain
from fastmp.nn.recompute import recompute
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer

pytestmark = pytest.mark.usefixtures("one_thread")


def attention(x):
    """An op that may draw, and here does not."""
    heads = x[None, None]
    return nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]


class Noisy(nn.Module):
    """Draws from two streams, outside of recomputed parts and in them."""

    def __init__(self, rng):
        super().__init__()
        self.rng, self.first, self.second = rng, nn.Linear(8, 8), nn.Linear(8, 8)

    def part(self, x):
        x = torch.dropout(attention(self.second(x)), 0.3, True)
        with self.rng.fork():
            return torch.dropout(x, 0.2, True).tanh()

    def forward(self, x):
        x = torch.dropout(attention(self.first(x)), 0.1, True)
        for _ in range(2):
            x = recompute(self.part, x, rng=self.rng)
        return torch.dropout(x, 0.1, True)


def make(in_graph, microbatches=3, **options):
    """A step of AdamW on some microbatches: a function of their inputs and the learning rate."""
    rng = RngTracker(5)
    model = Noisy(rng).double()
    grads = GradBuffer(model.named_parameters())
    optimizer = AdamW(grads)

    def step(inputs, lr):
        grads.zero()
        losses = []
        for x in inputs:
            loss = model(x).square().sum()
            loss.backward()
            losses.append(loss.detach())
        grads.reduce()
        norm = sum(losses)
        optimizer.step(lr, grad_norm=norm)
        return {"losses": losses, "norm": norm, "nothing": None}

    if in_graph:
        options = {"backend": RecordingBackend(rng), "trains": True, "warmup": 2, **options}
        return FunctionGraph(step, [model], name="the step", advice="do without", **options), model
    return step, model


def batches(step, rows=4):
    draws = torch.Generator().manual_seed(step)
    inputs = [torch.randn(rows, 8, generator=draws, dtype=torch.float64) for _ in range(3)]
    if step == 5:
        inputs[1][0, 0] = torch.inf  # a step that is skipped
    return inputs, torch.tensor(1e-2 / (1 + step), dtype=torch.float64)


def run(in_graph, steps=8, each=lambda step, model: None):
    function, model = make(in_graph)
    kept = []
    for step in range(steps):
        each(step, model)
        kept.append(function(*batches(step, 4 + 2 * (step % 3 == 2))))
    numbers = [number for one in kept for number in (*one["losses"], one["norm"])]
    assert all(one["nothing"] is None for one in kept)
    return [*numbers, *(param.detach() for param in model.parameters())], function


def same(first, second):
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second)):
        assert torch.equal(a, b) or (a.isnan() & b.isnan()).all(), i


def test_each_signature_has_a_graph_that_repeats_recomputed_parts():
    """With the same draws, other learning rates, a skipped step, and results that nobody overwrites."""
    graphed, function = run(True)
    same(graphed, run(False)[0])
    assert function.num_graphs == 2
    assert function.static_bytes == (4 + 6) * 3 * 8 * 8 + 2 * 8
    assert function.describe().startswith("2 graphs of the step, 0.00 MB of static buffers, ")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.second.bias.requires_grad_(False),
        *full([lambda model: model.second.eval()]),
    ],
)
def test_graphs_are_made_anew_where_the_model_has_changed(change):
    def each(step, model):
        if step == 5:
            change(model)

    same(run(True, each=each)[0], run(False, each=each)[0])


def test_a_captured_backward_accumulates_by_nodes_of_its_own():
    """Not by those of an earlier loss, which would run on its stream."""
    function, model = make(True)
    for step in range(2):
        function(*batches(step))
    before = get_gradient_edge(model.first.weight).node
    assert get_gradient_edge(model.first.weight).node is before
    function(*batches(3))
    assert function.num_graphs == 1 and get_gradient_edge(model.first.weight).node is not before


def test_graphs_go_by_address():
    function, model = make(True)
    for step in range(4):
        function(*batches(step))
    model.first.weight.data = model.first.weight.data.clone()
    with pytest.raises(
        GraphError, match=r"'0\.module\.first\.weight' of chunk 0 .* since graphs were captured"
    ):
        function(*batches(4))
    function.remove()
    function(*batches(4))
    assert function.num_graphs == 0


HOOKS = [
    (lambda model: model.first.register_forward_hook(print), "Linear"),
    (lambda model: model.first.register_forward_pre_hook(print), "Linear"),
    (lambda model: model.first.register_full_backward_hook(print), "Linear"),
    (lambda model: model.first.weight.register_hook(print), "parameter 'first.weight'"),
    (
        lambda model: model.second.weight.register_post_accumulate_grad_hook(print),
        "parameter 'second.weight'",
    ),
    (lambda model: model.second.register_forward_pre_hook(replayed), "Linear"),
]


def replayed(module, inputs):
    """A hook that a manager calls beside a replay."""


replayed.replayed = True


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(("hook", "owner"), HOOKS)
def test_a_hook_that_a_replay_would_skip_is_refused(steps, hook, owner):
    function, model = make(True)
    for step in range(steps):
        function(*batches(step))
    hook(model)
    message = f"{owner} has a hook, (print|replayed), that a replay of the step would skip; .*; do without"
    with pytest.raises(GraphError, match=message):
        function(*batches(steps))


def test_what_no_graph_can_hold_is_named():
    def reads(x):
        return x / 2 if x.sum() > 1e9 else x * 2

    function = FunctionGraph(reads, [], backend=RecordingBackend(), name="a test", advice="use another scope")
    x = torch.ones(3)
    assert torch.equal(function(x), x * 2)
    with pytest.raises(
        CaptureError, match=r"capture of a test: .*sum\(\) > 1e9.*; use another scope"
    ) as error:
        function(x)
    assert "reads a value on the host" in str(error.value)


def test_more_signatures_than_have_graphs_run_eagerly():
    function = FunctionGraph(torch.square, [], backend=RecordingBackend(), name="a test", advice="")
    for _ in range(3):
        for rows in range(1, 8):
            assert torch.equal(function(torch.full((rows,), 3.0)), torch.full((rows,), 9.0))
    assert function.num_graphs == 4


def test_the_default_dtype_is_part_of_the_signature():
    def work():
        return torch.ones(3) / 10

    function = FunctionGraph(work, [], backend=RecordingBackend(), name="a test", advice="")
    try:
        for _ in range(3):
            for dtype in (torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                assert function().dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert function.num_graphs == 2


def test_the_modes_of_torch_are_part_of_the_signature():
    """Those of gradients too; where autocast has cast a weight before a capture, the graph casts it anew."""
    model, x = nn.Linear(3, 3), torch.eye(3)

    def work():
        return (model(x) * (2 if torch.is_grad_enabled() else 1)).detach()

    function = FunctionGraph(work, [model], backend=RecordingBackend(), name="a test", advice="")
    modes = torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu")
    for _ in range(3):
        for mode in modes:
            for _ in range(2):
                with mode():
                    assert torch.equal(function(), work())
        with torch.no_grad():
            model.weight += 1
    assert function.num_graphs == len(modes)


@pytest.mark.parametrize(
    "view",
    [
        torch.t,
        lambda x: x[:, ::2],
        *full([lambda x: x[0].expand(3, 257, -1)[:, 1:], lambda x: x[0].flatten().unfold(0, 9, 4)]),
    ],
)
def test_arguments_keep_their_strides(view):
    """Sums along them have the same bits. With other strides, there is another graph."""

    def work(x):
        return x.sum(), x.flatten().cumsum(0), x.is_contiguous()

    function = FunctionGraph(work, [], backend=RecordingBackend(), name="a test", advice="")
    for number in range(8):
        x = view(torch.randn(257, 513))
        x = x.contiguous() if number > 3 else x
        (*got, like), (*expected, layout) = function(x), work(x)
        assert like == layout and all(map(torch.equal, got, expected))
    assert function.num_graphs == 2


def test_numbers_are_part_of_the_signature():
    function = FunctionGraph(torch.mul, [], backend=RecordingBackend(), name="a test", advice="")
    for number in (1, True, 1.0, 0.0, -0.0):
        for _ in range(3):
            made, expected = function(torch.tensor(2), number), torch.mul(torch.tensor(2), number)
            assert made.dtype == expected.dtype and str(made) == str(expected)
    assert function.num_graphs == 4


class Loop:
    """Steps of torch's own optimizer around or in a function of gradients."""

    def __init__(self, inside, in_graph, set_to_none=True):
        torch.manual_seed(2)
        self.model, self.inside, self.set_to_none = nn.Linear(4, 4), inside, set_to_none
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.function = self.gradients
        if in_graph:
            options = {"backend": RecordingBackend(), "trains": True, "name": "a test", "advice": ""}
            self.function = FunctionGraph(self.gradients, [self.model], **options)

    def gradients(self, x):
        if self.inside:
            self.optimizer.zero_grad(self.set_to_none)
        loss = self.model(x).square().sum()
        loss.backward()
        if self.inside:
            self.optimizer.step()
        return loss.detach()

    def step(self, x):
        if not self.inside:
            self.optimizer.zero_grad(self.set_to_none)
        loss = self.function(x)
        if not self.inside:
            self.optimizer.step()
        return [loss, *(each.detach().clone() for p in self.model.parameters() for each in (p, p.grad))]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_are_those_of_the_last_call(inside, set_to_none):
    """Where steps have two shapes, and gradients are dropped or zeroed first, by the graph or the host."""
    eager, graphed = (Loop(inside, in_graph, set_to_none) for in_graph in (False, True))
    for number in range(9):
        x = torch.randn(2 + number % 3 // 2, 4, generator=torch.Generator().manual_seed(number))
        same(graphed.step(x), eager.step(x))
    assert graphed.function.num_graphs == 2


def test_gradients_that_replays_would_miss_are_refused():
    loop = Loop(False, True, set_to_none=False)
    for _ in range(3):
        loop.step(torch.ones(2, 4))
    loop.optimizer.zero_grad()
    with pytest.raises(GraphError, match=r"gradient of parameter 'weight' is None now, .* set gradients"):
        loop.function(torch.ones(2, 4))


@pytest.mark.parametrize("change", [torch.mul, torch.Tensor.mul_, *full([torch.clamp])])
def test_a_gradient_that_is_read_and_replaced_is_refused(change):
    """A replay would read that of the capture for ever; one that is changed in place stays where it is."""

    def loop(in_graph):
        torch.manual_seed(2)
        model, seen = nn.Linear(4, 4), []

        def work(x):
            model(x).square().sum().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.grad = change(param.grad, 0.5)

        options = {"backend": RecordingBackend(), "trains": True, "name": "a test", "advice": ""}
        function = FunctionGraph(work, [model], **options) if in_graph else work
        for number in range(1, 5):
            function(torch.full((2, 4), float(number)))
            seen.append(model.weight.grad.clone())
        return seen

    if change is torch.Tensor.mul_:
        same(loop(True), loop(False))
    else:
        with pytest.raises(CaptureError, match="it replaces a gradient that it has read; change it in place"):
            loop(True)


def test_a_gradient_is_known_by_its_place():
    """A detached one lies where it did; one in another order of dimensions does not."""
    eager, graphed = (Loop(False, in_graph, set_to_none=False) for in_graph in (False, True))
    for number in range(6):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        same(graphed.step(x), eager.step(x))
        for param in graphed.model.parameters():
            param.grad = param.grad.detach()
    weight = graphed.model.weight
    weight.grad = weight.grad.t()
    with pytest.raises(GraphError, match=r"'weight' is .* strides \(1, 4\) now, and was .* strides \(4, 1\)"):
        graphed.function(x)


def test_an_argument_in_memory_that_is_written_is_refused():
    """A replay would read its copy, as it was before: of a weight that the function changes, say."""
    weight = torch.zeros(2)

    def work(x):
        weight.add_(1)
        return x * 2

    def made():
        return FunctionGraph(work, [], backend=RecordingBackend(), name="a test", advice="")

    function = made()
    assert torch.equal(function(weight.data), weight * 2)
    with pytest.raises(CaptureError, match="it writes to an argument"):
        function(weight.data)
    function = made()
    for _ in range(3):
        assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))
    before = weight.clone()
    with pytest.raises(GraphError, match="a test: it writes to an argument"):
        function(weight.view(2))
    assert torch.equal(weight, before)


def seeded(x):
    torch.manual_seed(1)
    return x + torch.rand(2)


def seeded_behind(x):
    x = x + torch.rand(2)
    torch.manual_seed(1)
    return x


REFUSED = [
    (CaptureError, lambda x: x.mul_(2), torch.ones(2), "it writes to an argument"),
    (CaptureError, lambda x: x * x.tolist()[0], torch.ones(2), r"tolist\(\) reads values on the host"),
    (CaptureError, lambda x: x * float(x.numpy()[0]), torch.ones(2), "numpy"),
    (CaptureError, seeded, torch.ones(2), r"stream 'default' has got a seed or a state.*torch\.rand\(2\)"),
    (CaptureError, seeded_behind, torch.ones(2), "stream 'default' has got a seed or a state"),
    (ValueError, torch.square, torch.ones(2, requires_grad=True), "argument of a test requires grad"),
    (ValueError, torch.as_tensor, torch.ones(2).numpy(), "is of type ndarray; it takes tensors"),
    (ValueError, lambda x: WEIGHT * x, torch.ones(2), "returns a tensor that requires grad"),
]
WEIGHT = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(("kind", "work", "x", "message"), REFUSED)
def test_what_no_replay_would_do_is_refused(kind, work, x, message):
    function = FunctionGraph(work, [], backend=RecordingBackend(), name="a test", advice="")
    with pytest.raises(kind, match=message):
        for _ in range(2):
            function(x)


def test_shapes_that_never_come_again_leave_little():
    function = FunctionGraph(torch.square, [], backend=RecordingBackend(), name="a test", advice="")
    for rows in range(1000):
        function(torch.ones(rows))
    assert len(function._traced) < 100


def test_explaining_a_model_leaves_its_graphs_alone():
    chain = LayerChain([nn.Linear(4, 4), nn.GELU()])
    graph = FunctionGraph(
        torch.no_grad()(chain.forward), [chain], backend=RecordingBackend(), name="the forward", advice=""
    )
    for _ in range(3):
        graph(torch.randn(2, 4))
    explain(chain, torch.randn(2, 4))
    graph(torch.randn(2, 4))
    assert graph.num_graphs == 1


def test_a_number_called_runner_is_a_number():
    class Scaled(nn.Module):
        runner = 2.0

        def forward(self, x):
            return x * self.runner

    layer, x = Scaled(), torch.ones(3)
    layer.runner = 3.0
    graph = FunctionGraph(layer.forward, [layer], backend=RecordingBackend(), name="the forward", advice="")
    for number in (3.0, 3.0, 3.0, 5.0):
        layer.runner = number
        assert torch.equal(graph(x), x * number)
