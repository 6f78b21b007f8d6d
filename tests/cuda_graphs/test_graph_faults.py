"""Plans and managers that are wrong in one thing change results, or are refused; and what may change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from layout_tools import DENSE_4, MOE_4, SOME, Layout, Training
from torch import nn

from fastmp.cuda_graphs import graph_set, hooks, partition, warmup_trace
from fastmp.cuda_graphs import manager as managers
from fastmp.cuda_graphs.backends.recording import Pool, RecordingBackend
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.graph_set import ReplaySlot
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer
from fastmp.ops.wgrad import WgradQueue
from fastmp.pipeline.runner import PipelineError
from fastmp.schedule.buffer_plan import SpanSpec, TensorSpec, plan_buffers
from fastmp.schedule.buffer_plan import plan_errors as problems
from fastmp.schedule.schedule import BACKWARD, FORWARD, Step
from tools.prove.graphs import ORDER as OVERLAPPING
from tools.prove.graphs import one_buffer

DENSE, EXPERTS = (replace(config, num_layers=2) for config in (DENSE_4, MOE_4))
LAYOUT = Layout(DENSE, microbatches=2)
RECOMPUTED = replace(LAYOUT, options={"recompute": True})


def differs(graphed, eager):
    return not all(torch.equal(a, b) for a, b in zip(graphed, eager, strict=True))


def overlapping(graphs, scope=None, config=DENSE, steps=5, **options):
    """Both forwards, then both backwards, of one chunk."""
    training = Training(Layout(config, microbatches=2), ParallelGroups.alone(), graphs=graphs, **options)
    seen = []
    if graphs:
        training.manager.remove()
        training.manager = managers.GraphManager(
            [training.stages[0].layers], OVERLAPPING, backend=RecordingBackend(training.rng), scope=scope
        )
    for _ in range(steps):
        training.grads.zero()
        if graphs:
            training.manager.begin_step()
        losses = []
        for batch in training.batches(2):
            hidden = training.stages[0](batch[0])
            hidden = hidden if isinstance(hidden, torch.Tensor) else hidden.tensors
            losses.append(training._loss(hidden, batch))
        for loss in losses:
            loss.backward()
        training.optimizer.step()
        seen += losses
    return [*(loss.detach() for loss in seen), *(p.detach() for p in training.parameters.values())]


def test_forwards_that_overlap_are_right():
    assert not differs(overlapping(True), overlapping(False))
    assert not differs(overlapping(True, SOME, EXPERTS), overlapping(False, config=EXPERTS))


def test_a_buffer_reused_too_early(monkeypatch):
    monkeypatch.setattr(managers, "plan_buffers", one_buffer)
    with pytest.raises(GraphError, match="plan is wrong: buffer 0 is still needed by the backward"):
        overlapping(True)
    monkeypatch.setattr(managers, "check_plan", lambda plan: None)
    with pytest.raises(CaptureError, match="has been modified by an inplace operation"):
        overlapping(True)  # autograd sees it in the step that is captured


def test_a_lease_that_is_dropped():
    specs = [SpanSpec("all", (TensorSpec((1,), "float32"),))]
    right = plan_buffers(OVERLAPPING, [specs])
    found = problems(replace(right, leases=right.leases[1:]))
    assert any("is not held from" in text for text in found)


def test_a_stale_input(monkeypatch):
    eager = overlapping(False)
    monkeypatch.setattr(ReplaySlot, "fill", lambda self, tensors: self.static)
    assert differs(overlapping(True), eager)


def test_memory_of_the_pool_that_is_free_too_early(monkeypatch):
    eager = overlapping(False)
    keep = Pool.keep

    def keep_and_free(self, tensor):
        kept = keep(self, tensor)
        block = self.block_of(kept)
        self._free[block.nbytes].append(block)  # though somebody holds it
        return kept

    monkeypatch.setattr(Pool, "keep", keep_and_free)
    assert differs(overlapping(True), eager)


class Scale(SegmentedLayer):
    """x * weight, whose gradient is x * gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def segments(self):
        return (Segment("scale", lambda x: (x * self.weight,)),)


def two_microbatches(steps=4):
    """Gradients of the weight and of a leaf before it, after microbatches that weigh 1 and 10."""
    chain, x = LayerChain([Scale()]), torch.ones(3, dtype=torch.float64, requires_grad=True)
    order = [Step(kind, i, 0) for i in (0, 1) for kind in (FORWARD, BACKWARD)]
    manager = managers.GraphManager([chain], order, backend=RecordingBackend())
    for _ in range(steps):
        manager.begin_step()
        x.grad = chain[0].weight.grad = None
        for weight in (1, 10):
            (chain(x)[0] * weight).sum().backward()
    return x.grad[0].item(), chain[0].weight.grad[0].item()


def test_a_gradient_that_is_handed_out_without_a_copy(monkeypatch):
    assert two_microbatches() == (11, 11)

    def hand_out(gradients):
        for param, grad in gradients.parameters:
            if param.grad is None:
                param.grad = grad()
            else:
                param.grad.add_(grad())

    monkeypatch.setattr(graph_set.Gradients, "accumulate", torch.no_grad()(hand_out))
    assert two_microbatches() == (11, 20)


def replayed(hook):
    hook.replayed = True
    return hook


def hooked(graphs, steps=4):
    """What hooks before forward and behind gradients see, in each of some steps."""
    chain, seen = LayerChain([Scale(), Scale()]), []
    x = torch.ones(3, dtype=torch.float64)
    for i, layer in enumerate(chain):
        layer.register_forward_pre_hook(replayed(lambda module, args, i=i: seen.append(("forward", i))))
        layer.weight.register_post_accumulate_grad_hook(
            lambda param, i=i: seen.append(("gradient", i, param.grad.tolist()))
        )
    order = [Step(kind, i, 0) for i in (0, 1) for kind in (FORWARD, BACKWARD)]
    manager = managers.GraphManager([chain], order, backend=RecordingBackend()) if graphs else None
    for _ in range(steps):
        if graphs:
            manager.begin_step()
        for param in chain.parameters():
            param.grad = None
        for weight in (1, 10):
            (chain(x)[0] * weight).sum().backward()
    return seen


@pytest.mark.parametrize("skipped", ("call_pre_hooks", "call_grad_hooks"))
def test_a_hook_that_is_not_run_by_hand(skipped, monkeypatch):
    eager = hooked(False)
    assert hooked(True) == eager
    monkeypatch.setattr(hooks, skipped, lambda hooked: None)
    assert hooked(True) != eager


def test_hooks_before_the_forward_of_layers_that_are_recomputed():
    """Once in a forward; of a module that runs eagerly also in its recomputation, as without graphs."""
    training, seen = trained(RECOMPUTED, scope=("attention",)), Counter()
    layer = training.stages[0].layers[0]
    for name, module in (("layer", layer), ("attention", layer.attention), ("mlp", layer.mlp)):
        module.register_forward_pre_hook(replayed(lambda *_, name=name: seen.update([name])))
    training.gradients()
    assert seen == {"layer": 2, "attention": 2, "mlp": 4}


def trained(layout=LAYOUT, **options):
    training = Training(layout, ParallelGroups.alone(), graphs=True, **options)
    for _ in range(4):
        training.step()
    return training


def corrupt(training):
    """A replay whose result is off in one bit."""
    captured = next(iter(training.manager._graph_set.captured.values()))
    replay, output = captured.forward.replay, captured.outputs[0]

    def wrong():
        replay()
        output().view(torch.int64).view(-1)[0].bitwise_xor_(1)

    captured.forward.replay = wrong


def test_verification_names_run_microbatch_and_tensor():
    training = trained(verify_every=3)
    training.step()
    corrupt(training)
    training.step()  # nobody looks in this one
    message = r"forward of microbatch 0 chunk 0, span '0.attention to 1.mlp': output 0 is up to .*e-"
    with pytest.raises(PipelineError, match=message):
        training.step()


def test_verification_of_parts_that_are_recomputed():
    training = trained(RECOMPUTED, scope=("attention",), verify_every=1)
    training.step()
    corrupt(training)
    with pytest.raises(PipelineError, match=r"span '0.attention': output 0 is up to .*e-"):
        training.step()


def test_verification_sees_gradients():
    training = trained(verify_every=2)
    captured = next(iter(training.manager._graph_set.captured.values()))
    replay = captured.backward.graph.replay
    weight = training.stages[0].layers[1].mlp_norm.weight

    def wrong():
        replay()
        weight.main_grad[0] += 1

    captured.backward.graph.replay = wrong
    with pytest.raises(
        PipelineError, match=r"the main gradient of parameter '1.mlp_norm.weight' is up to 1 from what"
    ):
        training.step()
        training.step()


def changed(graphs, change):
    training = Training(LAYOUT, ParallelGroups.alone(), graphs=graphs)
    seen = [number for _ in range(5) for number in training.step()]
    change(training)
    return training, [*seen, *(number for _ in range(5) for number in training.step())]


def freeze(training):
    training.stages[0].layers[0].mlp_norm.weight.requires_grad_(False)


def without_dropout(training):
    for module in training.stages[0].layers[0].modules():
        if hasattr(module, "probability"):
            module.train(False)
    training.step = lambda step=training.gradients: step()  # evaluation would put it back in training mode


@pytest.mark.parametrize("change", (freeze, without_dropout))
def test_other_modes_are_captured_anew(change):
    graphed, eager = changed(True, change), changed(False, change)
    assert not differs(graphed[1], eager[1])
    manager = graphed[0].manager
    assert manager.num_graphs == manager.plan.num_graphs == 2


def shapes(graphs, sizes, **options):
    training = Training(replace(LAYOUT, **options), ParallelGroups.alone(), graphs=graphs)
    seen = []
    for sequences in sizes:
        training.pipeline.forget_shapes()
        seen += training.step(sequences=sequences)
    return training.manager, seen


def test_each_shape_of_a_step_has_graphs_of_its_own_until_there_are_many():
    sizes = [2, 2, 2, 3, 3, 2, 3, 1, 1, 4, 4, 5, 5, 5, 2, 3, 4, 1]
    (manager, graphed), (_, eager) = shapes(True, sizes), shapes(False, sizes)
    assert not differs(graphed, eager)
    assert manager.num_graphs == 4 * 2
    assert manager.static_bytes == sum(each.plan.nbytes for each in manager._graph_sets.values())


def uneven(graphs, microbatches, config=DENSE, scope=None):
    """Steps in which microbatches have different numbers of sequences, two of them in flight at once."""
    training = Training(Layout(config, microbatches=2), ParallelGroups.alone(), graphs=False)
    manager, seen = None, []
    if graphs:
        manager = managers.GraphManager(
            [training.stages[0].layers], OVERLAPPING, backend=RecordingBackend(training.rng), scope=scope
        )
    for step in microbatches:
        training.grads.zero()
        if manager is not None:
            manager.begin_step()
        losses = []
        for sequences in step:
            (batch,) = training.batches(1, sequences)
            losses.append(training._loss(training.stages[0](batch[0]), batch))
        for loss in losses:
            loss.backward()
        training.optimizer.step()
        seen += [loss.detach() for loss in losses]
    return manager, [*seen, *(p.detach() for p in training.parameters.values())]


def test_a_microbatch_of_another_shape_while_others_are_captured():
    """A graph captured later than its neighbours would take the memory that they write to."""
    steps = [(2, 2), (2, 2), (2, 3), (2, 2), (2, 3), (2, 2), (3, 2), (3, 3), (2, 2)]
    (manager, graphed), (_, eager) = uneven(True, steps), uneven(False, steps)
    assert not differs(graphed, eager)
    assert manager.num_graphs == 4


def failing(graphs, monkeypatch):
    """Steps, two of which fail on the way: while graphs are captured, and when they are replayed."""

    def fail(*arguments):
        raise RuntimeError("on the way")

    training, seen = Training(LAYOUT, ParallelGroups.alone(), graphs=graphs), []
    for step in range(8):
        if step in (2, 5):
            with monkeypatch.context() as patch, pytest.raises(PipelineError, match="on the way"):
                patch.setattr(training.stages[-1], "token_losses", fail)
                training.gradients()
        seen += training.step()
    return seen


def test_a_step_that_fails_leaves_nothing_behind(monkeypatch):
    assert not differs(failing(True, monkeypatch), failing(False, monkeypatch))


def test_a_store_that_is_not_cleared(monkeypatch):
    """What a backward has deferred stays in its queue, and is made once more."""
    layout = Layout(DENSE, microbatches=2, schedule="zero_bubble")

    def run(graphs):
        training = Training(layout, ParallelGroups.alone(), graphs=graphs)
        return [number for _ in range(4) for number in training.step()]

    eager = run(False)
    assert not differs(run(True), eager)
    monkeypatch.setattr(WgradQueue, "take", lambda self: list(self._tasks))
    with pytest.raises(PipelineError, match="graph"):
        run(True)


class Turned(SegmentedLayer):
    """Runs with transposed tensors between them, some of them handed on as they came."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(33, 33, dtype=torch.float64) for _ in range(2))

    def segments(self):
        return (
            Segment("turn", lambda x: (self.first(x).transpose(0, 1), x)),
            Segment("between", lambda x, y: (x, y.transpose(0, 1)), capturable=False),
            Segment("join", lambda x, y: (self.second(x).transpose(0, 1), y)),
            Segment("pass", lambda x, y: (x, y), capturable=False),
        )


def turned(graphs):
    torch.manual_seed(0)
    chain = LayerChain([Turned(), Turned()])
    order = [Step(kind, i, 0) for i in (0, 1) for kind in (FORWARD, BACKWARD)]
    manager = managers.GraphManager([chain], order, backend=RecordingBackend()) if graphs else None
    seen = []
    for _ in range(5):
        if graphs:
            manager.begin_step()
        for _ in range(2):
            x = torch.randn(5, 33, 7, dtype=torch.float64).transpose(1, 2).requires_grad_()
            outputs = chain(x)
            sum(output.square().sum() for output in outputs).backward()
            seen += [*(output.detach() for output in outputs), x.grad]
    return [*seen, *(param.grad for param in chain.parameters())]


def test_inputs_in_another_order_of_dimensions(monkeypatch):
    """Products on them differ in bits from those on contiguous copies."""
    eager, spec_of = turned(False), partition.spec_of
    assert not differs(turned(True), eager)
    for module in (managers, warmup_trace, partition, graph_set):
        monkeypatch.setattr(module, "spec_of", lambda tensor: spec_of(tensor)._replace(strides=None))
    assert differs(turned(True), eager)
