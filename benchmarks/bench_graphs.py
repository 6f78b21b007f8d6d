"""Host time, copies and memory of replays, and layers and steps in graphs beside eager ones.

`python -m benchmarks.bench_graphs` prints tables. The manager's host times are taken with graphs that do
nothing, so that only the manager and its autograd node are left. Without a GPU, rows that need one are "not
measured", and recorded graphs are timed, which run every op again and save no time. `pytest
benchmarks/bench_graphs.py --benchmark-only` times layers beside their rivals.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import OURS, TE, Case, Workload, title
from benchmarks.conftest import DEVICE
from benchmarks.graphs_over_ranks import layers_over_ranks, sizes_on_the_host
from benchmarks.peers import peer, why_absent
from benchmarks.report import NOT_MEASURED, size
from fastmp.apps.generation.incremental import Decoder
from fastmp.config import GPTConfig, GraphConfig, MoEConfig, TrainConfig
from fastmp.cuda_graphs import replay_program
from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.cuda_graphs.snapshot import ModelSnapshot
from fastmp.cuda_graphs.transformer_engine import TransformerEngineManager
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, LayerChain, Placement, TransformerLayer
from fastmp.nn.segment import Segment, SegmentedLayer, Tensors
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.schedule import Schedule
from fastmp.training import graphing
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer
from tools.silent_graphs import SilentBackend, SilentGraph

IN_GRAPHS, TORCH_GRAPHS = "fastmp in graphs", "torch make_graphed_callables"
WARMUP = 5  # steps, after which all graphs are captured
STEPS, MICROBATCHES = 300, 8
GOALS_ON_GPU = (
    "host time from entry to launch: at most 8 us a replay, at most 12 us with 8 copies in one launch",
    "no copy where runs are chained; host time of torch.cuda.make_graphed_callables: at least 1.5 x ours",
    "a layer of experts at small microbatches: at least 1.3 x as fast as eager",
)


class _Wide(SegmentedLayer):
    """One run of `width` inputs, behind an eager segment that makes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.ones(64))

    def segments(self) -> tuple[Segment, ...]:
        return (Segment("spread", lambda x: (x,) * self.width, capturable=False), Segment("work", self._work))

    def _work(self, *tensors: Tensor) -> Tensors:
        return (sum(tensors) * self.weight,)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Bare(Function):
    """The node of autograd alone."""

    made = torch.zeros(64)

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        SilentGraph().replay()
        return _Bare.made.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        SilentGraph().replay()
        return (_Bare.made.detach(),) * ctx.count


@dataclass
class Host:
    """Least times in microseconds: from entry to launch, and from entry to return."""

    forward: tuple[float, float]
    backward: tuple[float, float]

    @classmethod
    def of(cls, call: Callable[[Tensor], Tensor], begin: Callable[[], None]) -> Host:
        forward: list[tuple[int, int]] = []
        backward: list[tuple[int, int]] = []
        leaf, grad = torch.ones(64, requires_grad=True), torch.ones(64)
        for _ in range(WARMUP + STEPS):
            begin()
            for _ in range(MICROBATCHES):
                x = leaf * 1
                start = time.perf_counter_ns()
                made = call(x)
                end = time.perf_counter_ns()
                forward.append((SilentGraph.launched - start, end - start))
                start = time.perf_counter_ns()
                made.backward(grad)
                end = time.perf_counter_ns()
                backward.append((SilentGraph.launched - start, end - start))
        return cls(_least(forward), _least(backward))


def _least(times: list[tuple[int, int]]) -> tuple[float, float]:
    launched, returned = zip(*times[WARMUP * MICROBATCHES :])
    return min(launched) / 1e3, min(returned) / 1e3


@contextmanager
def _by(module: ModuleType | None) -> Iterator[None]:
    """Inside, steps in graphs are run by C++, or by Python where `module` is None."""
    kept, replay_program.REPLAY = replay_program.REPLAY, module
    try:
        yield
    finally:
        replay_program.REPLAY = kept


def _modules() -> dict[str, ModuleType | None]:
    return (
        {"Python": None} if replay_program.REPLAY is None else {"C++": replay_program.REPLAY, "Python": None}
    )


def _silent(chain: LayerChain, **options: Any) -> GraphManager:
    manager = GraphManager([chain], Schedule(1, MICROBATCHES).order(0), backend=SilentBackend(), **options)
    GradBuffer(chain.named_parameters())
    return manager


def _one_more_run(longer: int = 8) -> tuple[float, float]:
    """Host time that a replay adds to a chain, forward and backward, from entry to return, in us."""
    times = []
    for runs in (1, 1 + longer):
        chain = LayerChain([_Scale() for _ in range(runs)])
        manager = _silent(chain, span_size=64)
        times.append(Host.of(lambda x, chain=chain: chain(x)[0], manager.begin_step))
    one, many = times
    return tuple((getattr(many, way)[1] - getattr(one, way)[1]) / longer for way in ("forward", "backward"))


class _Copies(TorchDispatchMode):
    """Counts what only moves data."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_foreach_copy_"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def host_times() -> Iterator[str]:
    yield "host time of a replay in us, graphs that do nothing: entry to launch, entry to return"
    yield f"{'inputs':>8}{'':>28}{'forward':>18}{'backward':>18}{'copies, a pair':>40}"
    modules = _modules()
    for width in (1, 8):
        for name, module in modules.items():
            with _by(module):
                chain = LayerChain([_Wide(width)])
                manager = _silent(chain)
                host = Host.of(lambda x, chain=chain: chain(x)[0], manager.begin_step)
                yield _row(width, f"a chain of one run, {name}", host, _copies(chain, manager))
        bare = Host.of(lambda x, n=width: _Bare.apply(*(x,) * n), lambda: None)
        yield _row(width, "a node in Python alone", bare)
    for name, module in modules.items():
        with _by(module):
            forward, backward = _one_more_run()
        yield f"{1:>8}{f'one more run, {name}':>28}{forward:>18.1f}{backward:>18.1f}"
    for name in (IN_GRAPHS, TORCH_GRAPHS, TE):
        yield f"{'':>8}{name:>28}{_on_gpu(name):>36}"


def _row(width: int, name: str, host: Host, note: str = "") -> str:
    cells = "".join(f"{first:>9.1f}{whole:>9.1f}" for first, whole in (host.forward, host.backward))
    return f"{width:>8}{name:>28}{cells}{note:>40}"


def _copies(chain: LayerChain, manager: GraphManager) -> str:
    x = torch.ones(64, requires_grad=True)
    manager.begin_step()
    with _Copies() as copies:
        for _ in range(MICROBATCHES):
            chain(x * 1)[0].backward(torch.ones(64))
    return ", ".join(f"{n / MICROBATCHES:g} {name}" for name, n in sorted(copies.counts.items()))


def _on_gpu(name: str) -> str:
    """Host time of a replay pair of a layer on a GPU, in us."""
    if DEVICE != "cuda":
        return NOT_MEASURED
    case = layer_case(512, 1024, 16, 8, 2, 512, torch.bfloat16, DEVICE)
    if name not in case.rivals:
        return why_absent(name)
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        case.rivals[name]()
        times.append(time.perf_counter_ns() - start)
    return f"{statistics.median(times) / 1e3 / MICROBATCHES:.1f} forward and backward"


def layer_case(
    tokens: int,
    hidden: int,
    heads: int,
    experts: int,
    k: int,
    ffn: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Case:
    """A step of one layer with experts: eight microbatches, forward and backward."""
    moe = MoEConfig(num_experts=experts, top_k=k, expert_ffn_hidden_size=ffn, aux_loss=0.01)
    config = GPTConfig(hidden_size=hidden, num_heads=heads, activation="swiglu", max_seq_len=tokens, moe=moe)
    torch.manual_seed(seed)
    layer = TransformerLayer(config, Placement(device=device, dtype=dtype))
    x, grad = (torch.randn(tokens, 1, hidden, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()
    rivals: dict[str, Callable[[], Tensor]] = {}

    def add(name: str, forward: Callable[[Tensor], Any], begin: Callable[[], None] = lambda: None) -> None:
        def step() -> Tensor:
            begin()
            for _ in range(MICROBATCHES):
                output, aux, *_ = forward(x)
                torch.autograd.backward((output, aux), (grad, torch.ones_like(aux)))
            return output.detach()

        for _ in range(WARMUP):
            step()
        rivals[name] = step

    def own_layer() -> TransformerLayer:
        own = copy.deepcopy(layer)
        GradBuffer(own.named_parameters())
        return own

    steps = Schedule(1, MICROBATCHES).order(0)
    add(OURS, own_layer())
    chain = LayerChain([own_layer()])
    backend = RecordingBackend() if device == "cpu" else CudaBackend()
    add(IN_GRAPHS, chain, GraphManager([chain], steps, backend=backend).begin_step)
    if device != "cpu":
        graphed = torch.cuda.make_graphed_callables(own_layer(), (x.detach().clone().requires_grad_(),))
        add(TORCH_GRAPHS, graphed)
    if peer(TE, "transformer_engine.pytorch.graph:make_graphed_callables", device) is not None:
        theirs = LayerChain([own_layer()])
        add(TE, theirs, TransformerEngineManager([theirs], steps).begin_step)
    held = sum(param.nbytes for param in layer.parameters())
    flops = 2 * tokens * (4 * hidden * hidden + hidden * experts + 3 * k * hidden * ffn) * MICROBATCHES
    return Case(
        title("graphed_moe_layer", (tokens, hidden, heads, experts, k, ffn), dtype),
        (x, *layer.parameters()),
        (),
        rivals,
        MICROBATCHES * (held + 2 * x.nbytes),
        MICROBATCHES * (2 * held + 3 * x.nbytes),
        flops=(flops, 2 * flops),
        capturable=False,
    )


# (tokens of a microbatch, H, heads, experts, k, F): Qwen3-30B-A3B with small microbatches, Mixtral 8x7B.
WORKLOADS = (
    Workload(
        "graphed_moe_layer",
        layer_case,
        cpu=((64, 128, 4, 8, 2, 64),),
        cuda=((512, 2048, 32, 128, 8, 768), (2048, 2048, 32, 128, 8, 768), (2048, 4096, 32, 8, 2, 14336)),
        rivals=(OURS, IN_GRAPHS, TORCH_GRAPHS, TE),
        directions=("step",),
    ),
)


def checks_before_a_step(rounds: int = 2000) -> Iterator[str]:
    """Host time of checking that a model has not changed since its graphs were captured."""
    model = GPT(GPTConfig(num_layers=32, hidden_size=16, num_heads=2, vocab_size=32, max_seq_len=16))
    GradBuffer(model.named_parameters())
    chain = model.layers
    for module in chain.modules():
        module.register_forward_pre_hook(_replayed)
    count = f"{len([*chain.modules()])} modules with a hook each, {len([*chain.parameters()])} parameters"
    yield f"checks before a step in us, {count}: of all, of modes again at the first forward"
    for name, module in _modules().items():
        with _by(module):
            snapshot = ModelSnapshot([chain])
            times = [[], []]
            for _ in range(rounds):
                start = time.perf_counter_ns()
                snapshot.changed()
                middle = time.perf_counter_ns()
                snapshot.modes_changed()
                times[0].append(middle - start)
                times[1].append(time.perf_counter_ns() - middle)
        whole, modes = (min(each) / 1e3 for each in times)
        yield f"{name:>20}{whole:>10.1f}{modes:>10.1f}"


def _replayed(module: nn.Module, args: tuple) -> None:
    """Stand in for the hook that waits for a module's parameters."""


_replayed.replayed = True


class _SameTokens:
    """Data of the smallest cost: one sample for ever."""

    micro_batch_size = 2

    def __init__(self) -> None:
        ids = torch.zeros(2, 64, dtype=torch.int64)
        self._batch = {"tokens": ids, "targets": ids}

    def batch(self, *_: int) -> dict[str, Tensor]:
        return self._batch

    def validation_batches(self, *_: int, **options: Any) -> list[dict[str, Tensor]]:
        return [self._batch]


def _small_model(rng: RngTracker) -> GPT:
    shape = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 256, "max_seq_len": 64}
    return GPT(GPTConfig(**shape), Placement(rng=rng, device=DEVICE))


def _trainer(graphs: GraphConfig | None) -> Trainer:
    rng, recipe = RngTracker(1, device=DEVICE), TrainConfig(global_batch_size=2 * MICROBATCHES)
    with mock.patch.object(graphing, "make_backend", lambda rng, device: SilentBackend()):
        return Trainer(_small_model(rng), _SameTokens(), token_loss, recipe, rng=rng, graphs=graphs)


def _timed(name: str, call: Callable[[], Any], rounds: int) -> str:
    times = []
    for _ in range(WARMUP + rounds):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return f"{name:>20}{1e3 * statistics.median(times[WARMUP:]):>10.3f}"


def host_times_of_steps(rounds: int = 30) -> Iterator[str]:
    """Host time of a step with graphs that do nothing, at each scope: the cost of everything outside
    graphs.
    """
    yield f"training step of {MICROBATCHES} microbatches in ms, 4 layers of 64, graphs that do nothing"
    yield _timed("eager", _trainer(None).train_step, rounds)
    for name, scope in (("layers", None), ("full", ("full",)), ("full_step", ("full_step",))):
        yield _timed(name, _trainer(GraphConfig(enabled=True, scope=scope)).train_step, rounds)


def host_times_without_gradients(rounds: int = 30) -> Iterator[str]:
    """The same of an evaluation, and of a step of generation."""
    yield "evaluation of a batch in ms, the same model"
    for name, graphs in (("eager", None), ("one graph", GraphConfig(enabled=True, evaluation=True))):
        yield _timed(name, _trainer(graphs).evaluate, rounds)
    yield "a step of generation in ms, the same model, two rows"
    model = _small_model(RngTracker(1, device=DEVICE)).eval()
    for name, backend in (("eager", None), ("one graph", SilentBackend())):
        decoder = Decoder(model, ParallelGroups.alone(), places=64, choose=_likeliest, backend=backend)
        lengths, points = torch.full((2,), 8, device=DEVICE), torch.zeros(2, 1, device=DEVICE)
        decoder.prefill(torch.ones(2, 8, dtype=torch.int64, device=DEVICE), lengths, points)
        yield _timed(name, decoder.step, rounds)


def _likeliest(logits_BV: Tensor, points_B: Tensor) -> Tensor:
    return logits_BV.argmax(-1)


def steps_and_memory(rounds: int = 9) -> Iterator[str]:
    """Training steps of a small GPT, eager and in graphs, and the bytes of the graphs."""
    on_gpu = DEVICE == "cuda"
    shape = {"num_layers": 8, "hidden_size": 1024, "num_heads": 16} if on_gpu else {"num_layers": 4}
    config = GPTConfig(**{"hidden_size": 64, "num_heads": 4, "vocab_size": 256, "max_seq_len": 64, **shape})
    place = {"device": DEVICE, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    ids = torch.zeros(2, 64, dtype=torch.int64, device=DEVICE)
    yield f"training step of {MICROBATCHES} microbatches, {config.num_layers} layers of {config.hidden_size}"
    for name, scope in (("eager", None), ("one run", None), ("attention alone", ["attention"])):
        rng = RngTracker(1, device=DEVICE)
        model = GPT(config, Placement(rng=rng, **place))
        GradBuffer(model.named_parameters())
        manager = None
        if name != "eager":
            backend = CudaBackend(rng) if on_gpu else RecordingBackend(rng)
            steps = Schedule(1, MICROBATCHES).order(0)
            manager = GraphManager([model.layers], steps, backend=backend, scope=scope)
        times = []
        for _ in range(WARMUP + rounds):
            start = time.perf_counter()
            if manager is not None:
                manager.begin_step()
            for _ in range(MICROBATCHES):
                model.loss(ids, ids).sum().backward()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        line = f"{name:>20}{1e3 * statistics.median(times[WARMUP:]):>10.2f} ms"
        if manager is not None:
            line += (
                f"   static buffers planned {size(manager.plan.nbytes)}, held {size(manager.static_bytes)}; "
                f"pool {size(manager.backend.nbytes)} of {manager.num_graphs} graphs"
            )
        yield line


def main() -> int:
    torch.set_num_threads(1)
    for line in (
        *host_times(),
        "",
        *checks_before_a_step(),
        "",
        *host_times_of_steps(),
        *host_times_without_gradients(),
        "",
        *layers_over_ranks(DEVICE),
        *sizes_on_the_host(),
        "",
        *steps_and_memory(),
        "",
        "goals on a GPU, none measured here:",
    ):
        print(line)
    for goal in GOALS_ON_GPU:
        print(f"  {goal}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
