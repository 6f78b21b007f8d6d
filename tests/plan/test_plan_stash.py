"""The size of the activation stash: entries in flight, the rows of the ring, loads stated and measured."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from marks import full

from fastmp.apps import plan
from fastmp.config import GPTConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig
from fastmp.config.dispatchers import STASH_STATE, STASH_TICKETS
from fastmp.config.recipe import load_recipe
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.overlap import OverlappedLayers
from fastmp.ops.stash import NEXT, OLDEST, OVERFLOWED, new_state, stash_release, stash_reserve, state_size
from fastmp.plan.layout import make_grid
from fastmp.plan.memory import memory
from fastmp.plan.rank_load import Load, MeasuredLoad
from fastmp.plan.resources import recipe_facts
from fastmp.plan.shapes import shapes_of
from fastmp.plan.stash_size import LiveEntries, live_entries, ring_of_rank, ring_rows
from fastmp.schedule.schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD, Schedule
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import model_and_loss
from fastmp.training.microbatches import MicrobatchRunner
from fastmp.training.stash_attachment import attach_stash

QWEN = Path(__file__).resolve().parents[2] / "configs" / "qwen3-30b-a3b.toml"
MODEL = GPTConfig(
    num_layers=8,
    hidden_size=64,
    num_heads=4,
    vocab_size=100,
    max_seq_len=64,
    activation="swiglu",
    moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=32, dispatcher="symmetric"),
)


class Allocated:
    """A ring as `fastmp.ops.stash` allocates it: an entry has consecutive rows, or does not fit."""

    def __init__(self, rows):
        self.rows, self.entries, self.widest = rows, [], 0

    def push(self, name, size):
        """Return False if the entry does not fit."""
        start = self.entries[-1][1] + self.entries[-1][2] if self.entries else 0
        tail = self.entries[0][1] if self.entries else 0
        wrapped = bool(self.entries) and self.entries[-1][1] < tail
        if not wrapped and start + size > self.rows:
            start, wrapped = 0, True
        if start + size > (tail if wrapped and self.entries else self.rows):
            return False
        self.entries.append([name, start, size, True])
        self.widest = max(self.widest, len(self.entries))
        return True

    def release(self, name):
        next(entry for entry in self.entries if entry[0] == name)[3] = False
        while self.entries and not self.entries[-1][3]:
            self.entries.pop()
        while self.entries and not self.entries[0][3]:
            self.entries.pop(0)


class OnDevice(Allocated):
    """The ring of `fastmp.ops.stash` itself."""

    def __init__(self, rows):
        super().__init__(rows)
        self.state, self.tickets = new_state(64, "cpu"), {}

    def push(self, name, size):
        ticket = self.tickets.setdefault(name, len(self.tickets))
        before = int(self.state[OVERFLOWED])
        stash_reserve(torch.tensor([size], dtype=torch.int32), self.state, self.rows, ticket)
        return super().push(name, size) and int(self.state[OVERFLOWED]) == before

    def release(self, name):
        stash_release(self.state, self.tickets[name])
        super().release(name)
        assert int(self.state[NEXT] - self.state[OLDEST]) == len(self.entries)


def run_step(order, layers, ring, sizes):
    """Run the steps layer by layer; return False once an entry does not fit."""
    for kind, microbatch, chunk in order:
        own = [(microbatch, chunk, layer) for layer in range(layers[chunk])]
        if kind == FORWARD and not all(ring.push(name, sizes[name]) for name in own):
            return False
        for name in reversed(own) if kind in (BACKWARD, BACKWARD_WEIGHT) else ():
            ring.release(name)
    return True


SCHEDULES = {
    "alone": (Schedule(1, 4), 0),
    "1f1b, first": (Schedule(4, 6), 0),
    "1f1b, last": (Schedule(4, 6), 3),
    "interleaved": (Schedule(2, 4, vpp=2), 0),
    "zero bubble": (Schedule(4, 6, name="zero_bubble"), 1),
    "zero bubble, last": (Schedule(4, 6, name="zero_bubble"), 3),
}
LAYERS = ([3, 2], [1, 0], [0, 0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_entries_are_those_of_the_ring(name):
    schedule, rank = SCHEDULES[name]
    order, random = schedule.order(rank), np.random.default_rng(3)
    for layers in LAYERS:
        live = live_entries(order, layers)
        ring, sizes = OnDevice(10**6), Counter(dict.fromkeys(np.ndindex(6, 2, 3), 1))
        assert run_step(order, layers, ring, sizes)
        assert ring.widest == live.most and not ring.entries
        # One entry more is enough for what is skipped at the end, whatever the sizes.
        for most in (1, 2, 9):
            full = OnDevice((live.most + live.wraps) * most)
            sizes = {each: int(random.integers(most + 1)) for each in np.ndindex(6, 2, 3)}
            assert run_step(order, layers, full, sizes)
        if live.most > 1:
            small = OnDevice(live.most - 1)
            assert not run_step(order, layers, small, dict.fromkeys(sizes, 1))


def test_entries_of_known_schedules():
    assert live_entries(Schedule(1, 8).order(0), [48]) == LiveEntries(48, 8, False)
    assert live_entries(Schedule(4, 8).order(0), [2]) == LiveEntries(8, 5, True)
    assert live_entries(Schedule(4, 8).order(3), [2]) == LiveEntries(2, 8, False)
    assert live_entries(Schedule(4, 8).order(3), [0]) == LiveEntries()


RANKS, BALANCED, EP = 4, 256, 4


@pytest.mark.parametrize("spread", [0.0, 0.05])
@pytest.mark.parametrize("name", ["alone", "1f1b, first", "zero bubble"])
def test_steps_overflow_as_often_as_planned(name, spread):
    schedule, rank = SCHEDULES[name]
    order, layers, chance, load = schedule.order(rank), [2, 2], 1e-2, Load(1.3, spread)
    live = live_entries(order, layers)
    sizes = {"balanced": BALANCED, "capacity": EP * BALANCED, "ep": EP, "ranks": RANKS, "overflow": chance}
    rows = ring_rows(live, load, **sizes)
    random, entries, steps = np.random.default_rng(7), [*np.ndindex(6, 2, 2)], 1000
    overflows = Counter()
    for _ in range(steps):
        for ring in (rows, rows * 4 // 5):
            fits = True
            for _ in range(RANKS):
                share = min(max(random.normal(load.mean, load.spread), 0.0) / EP, 1.0)
                drawn = random.binomial(EP * BALANCED, share, len(entries)).tolist()
                fits = fits and run_step(order, layers, Allocated(ring), dict(zip(entries, drawn)))
            overflows[ring] += not fits
    assert overflows[rows] <= chance * steps + 2 * (chance * steps) ** 0.5  # the share drawn has a spread
    assert overflows[rows * 4 // 5] > 2 * chance * steps  # a fifth less is too little
    assert rows < 1.5 * load.mean * BALANCED * live.most


def test_a_ring_sized_by_measured_loads_overflows_as_often(tmp_path):
    """Tokens of a microbatch choose alike, in all layers: the spread of independent choices is too small."""
    random, layers, count, chance = np.random.default_rng(5), 8, 4, 1e-2
    made = recipe(replace(MODEL, moe=replace(MODEL.moe, stash_overflow=chance)), count // 2, ep=2)
    shapes = shapes_of(made, 2)
    balanced = shapes.dispatch_sizes.choices

    def step():
        """Rows of both ranks (2, microbatches, layers); the first is busier, in some microbatches more so."""
        load = 0.1 + 0.01 * random.normal() + 0.03 * random.normal(size=(count, 1))
        busy = random.binomial(2 * balanced, (1 + load) / 2, (count, layers))
        return np.stack((busy, 2 * balanced - busy))

    loads, spreads = [], []
    for _ in range(100):
        of_microbatches = step().mean(2) / balanced
        loads.append(([1.1] * layers, [of_microbatches[0].mean()]))
        spreads.append(of_microbatches[0].std())
    file = write_metrics(tmp_path / "m", ep=2, stages=[], loads=loads, spread=float(np.mean(spreads)))
    rows = ring_of_rank(made, shapes, 0, measured=MeasuredLoad.read(file, made)).rows
    # Without pipeline parallelism the ring holds all layers of one microbatch.
    overflows = sum(bool((step().sum(2) > rows).any()) for _ in range(2000))
    assert overflows <= chance * 2000
    independent = ring_rows(
        live_entries(Schedule(1, count).order(0), [layers]),
        Load(float(np.mean([each for _, (each,) in loads]))),
        **{"balanced": balanced, "capacity": 2 * balanced, "ep": 2, "ranks": 2, "overflow": chance},
    )
    assert sum(bool((step().sum(2) > independent).any()) for _ in range(500)) > 5 * chance * 500
    assert rows < 1.25 * 8 * balanced


def test_rows_follow_probability_load_and_capacity():
    live = LiveEntries(48, 64)
    sizes = {"balanced": 8192, "capacity": 65536, "ep": 8, "ranks": 64, "overflow": 1e-4}
    rows = ring_rows(live, Load(1.2), **sizes)
    assert 1.2 * 48 * 8192 < rows < 1.21 * 48 * 8192
    assert ring_rows(live, Load(1.2), **{**sizes, "overflow": 1e-8}) > rows
    assert ring_rows(live, Load(1.2, 0.01), **sizes) > rows
    assert ring_rows(live, Load(1.3), **sizes) > rows
    assert ring_rows(live, Load(1.2, variance=1e-9), **sizes) == rows  # less than independent choices have
    assert ring_rows(live, Load(1.2, variance=1e-2), **sizes) > 1.01 * rows
    assert ring_rows(live._replace(wraps=True), Load(1.2), **sizes) > rows + 1.2 * 8192
    assert ring_rows(live, Load(99.0), **sizes) == 48 * 65536  # no entry has more
    assert ring_rows(live, Load(1.2), **{**sizes, "capacity": 9000}) == 48 * 9000
    assert ring_rows(LiveEntries(), Load(1.2), **sizes) == 0
    assert 0 < ring_rows(live, Load(1.2), **{**sizes, "overflow": 1e-320}) < 2 * rows


def recipe(model=MODEL, microbatches=4, **layout):
    made = Recipe(model=model, parallel=ParallelConfig(**layout))
    size = made.data.micro_batch_size * microbatches
    dp = 4 // layout.get("pp", 1)
    train = TrainConfig(global_batch_size=size * dp, dtype="float32")
    return replace(made, train=train, data=replace(made.data, seq_len=64))


def test_a_rank_keeps_its_rows_once():
    made = recipe(ep=2)
    shapes = shapes_of(made, 4)
    ring = ring_of_rank(made, shapes, 0)
    assert (ring.entries, ring.width) == (8, 64 + 3 * 32)
    assert ring.nbytes == ring.rows * ring.width * shapes.itemsize + 8 * STASH_STATE
    assert state_size(STASH_TICKETS) == STASH_STATE
    whole = replace(made, model=replace(MODEL, moe=replace(MODEL.moe, activation_stash=0.0)))
    assert ring_of_rank(whole, shapes_of(whole, 4), 0) is None
    orders = Schedule(1, 4).orders()
    ((with_stash,), (without,)) = (memory(each, shapes_of(each, 4), orders) for each in (made, whole))
    row = ring.width * shapes.itemsize
    saved = without.activations - with_stash.activations
    assert saved == 8 * shapes.rows_at_experts * row - ring.nbytes
    assert with_stash.total == without.total - saved and with_stash.stash == ring.nbytes
    assert with_stash.recomputed == without.recomputed  # layers that run again keep nothing in it
    assert without.stash == 0


BALANCED_MODEL = replace(
    MODEL, num_layers=4, moe=replace(MODEL.moe, num_experts=4, top_k=4, expert_ffn_hidden_size=16)
)


def run_layout(rank, size, made):
    """Return the bytes of a rank's ring after a step, and the most rows in use."""
    groups, count = ParallelGroups.create(make_grid(made, size)), 4
    model, loss = model_and_loss(made, groups)
    chunks = model if isinstance(model, list) else [model]
    overlap = OverlappedLayers([chunk.layers for chunk in chunks]) if made.parallel.overlap_experts else None
    runner = MicrobatchRunner(chunks, loss, groups=groups, num_microbatches=count, overlap=overlap)
    stash = attach_stash(runner, groups)
    tokens = torch.arange(65).repeat(made.data.micro_batch_size, 1)
    runner.train(lambda number: {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    assert not int(stash.overflowed)
    return stash.nbytes, int(stash.high_water)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"overlap_experts": True},
        pytest.param({"pp": 2}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        {"pp": 2, "schedule": "zero_bubble"},
        *full([{"mtp": 1}, {"mtp": 1, "overlap_experts": True}, {"mtp": 2, "pp": 2}]),
    ],
    ids=str,
)
def test_the_plan_is_what_ranks_allocate(layout):
    """All tokens choose all experts: every entry has the balanced rows."""
    layout, size = {**layout}, 2 * layout.get("pp", 1)
    model = replace(BALANCED_MODEL, position="rope", mtp_depth=layout.pop("mtp", 0))
    made = recipe(model, ep=2, **layout)
    made = replace(made, train=replace(made.train, global_batch_size=8 * made.data.micro_batch_size))
    shapes = shapes_of(made, size)
    assert shapes.num_microbatches == 4
    for rank, (nbytes, most) in enumerate(run_ranks(run_layout, size, made)):
        ring = ring_of_rank(made, shapes, rank // 2)
        assert nbytes == ring.nbytes
        rows = shapes.dispatch_sizes.choices
        assert ring.entries * rows <= most < (ring.entries + 1) * rows
        assert most == ring.entries * rows or layout  # with older entries before newer ones, rows are skipped


@pytest.mark.parametrize(
    ("layout", "entries", "width"),
    [
        ({"overlap_experts": True}, [None], 224),
        ({"pp": 2}, [8, 4], 160),
        ({"pp": 2, "schedule": "zero_bubble"}, [None, None], 224),
        ({"pp": 2, "vpp": 2}, [None, None], 160),
        ({"pp": 2, "stage_layers": (2, 6)}, [4, 6], 160),
    ],
)
def test_rings_of_layouts(layout, entries, width):
    made = recipe(ep=2, **layout)
    shapes = shapes_of(made, 4)
    rings = [ring_of_rank(made, shapes, rank) for rank in range(made.parallel.pp)]
    assert [ring.width for ring in rings] == [width] * len(rings)
    assert all(known in (None, ring.entries) for known, ring in zip(entries, rings, strict=True))
    if "overlap_experts" in layout:
        assert 8 < rings[0].entries <= 16  # of two microbatches, which come and go together


def test_layers_without_experts_have_no_entries():
    made = recipe(replace(MODEL, dense_layers=(0, 1, 2, 3)), ep=2, pp=2)
    shapes = shapes_of(made, 4)
    assert ring_of_rank(made, shapes, 0) is None and ring_of_rank(made, shapes, 1).entries == 4
    alone = recipe()  # all experts are local
    assert ring_of_rank(alone, shapes_of(alone, 4), 0) is None


def write_metrics(path, *, ep, stages, loads, spread=0.0):
    run = {"kind": "run", "step": 0, "ep": ep, "expert_stages": stages}
    lines = [run] + [
        {
            **{"kind": "experts", "step": step, "rank_load": layers, "stage_load": ranks},
            "stage_spread": [spread] * len(ranks) if isinstance(ranks, list) else None,
        }
        for step, (layers, ranks) in enumerate(loads, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_measured_load(tmp_path):
    loads = [([1.1, 1.3] * 4, [1.05, 1.2]), ([1.3, 1.5] * 4, [1.15, 1.4])]
    stages = [0] * 4 + [1] * 4
    file = write_metrics(tmp_path / "metrics.jsonl", ep=2, stages=stages, loads=loads)
    made = recipe(ep=2, pp=2)
    measured = MeasuredLoad.read(file, made)
    assert measured.of_rank(made, 0).mean == pytest.approx(1.1)
    assert measured.of_rank(made, 0).spread == pytest.approx(0.1 / 2**0.5)
    assert measured.of_rank(made, 1).mean == pytest.approx(1.3)
    file = write_metrics(tmp_path / "metrics.jsonl", ep=2, stages=stages, loads=loads, spread=0.1)
    measured = MeasuredLoad.read(file, made)
    assert measured.of_rank(made, 0).variance == pytest.approx(4 * 0.1**2)  # of the sum of 4: (4 x 0.1)^2
    other = recipe(ep=2)  # one stage: the busiest ranks of all layers may be one
    assert measured.of_rank(other, 0).mean == pytest.approx(1.3)
    assert measured.of_rank(other, 0).variance == pytest.approx(8 * 0.1**2)
    shapes = shapes_of(made, 4)
    ring = ring_of_rank(made, shapes, 1, measured=measured)
    assert ring.load == measured.of_rank(made, 1)
    assert ring.rows > ring_of_rank(made, shapes, 1).rows


def test_measured_loads_must_be_of_such_a_run(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_metrics(file, ep=4, stages=[], loads=[([1.0] * 8, [1.0])] * 2)
    with pytest.raises(ValueError, match="ep 2 and 8 layers with experts, got 0, but of ep 4 and 8 layers"):
        MeasuredLoad.read(str(file), recipe(ep=2))
    write_metrics(file, ep=2, stages=[], loads=[([1.0] * 8, [1.0])])
    with pytest.raises(ValueError, match=r"got 1$"):
        MeasuredLoad.read(str(file), recipe(ep=2))
    write_metrics(file, ep=2, stages=[], loads=[([1.0] * 8, []), ([None] * 8, [1.0]), (7, [1.0])])
    with pytest.raises(ValueError, match="got 0"):
        MeasuredLoad.read(str(file), recipe(ep=2))


def run(capsys, *arguments):
    status = plan.main(list(arguments))
    said = capsys.readouterr()
    assert status == 0, said.err
    return said.out


def test_the_plan_prints_bytes_probability_and_load(capsys, tmp_path):
    options = [str(QWEN), "--world-size", "64", "--dispatcher", "symmetric", "--ep", "8"]
    facts = json.loads(run(capsys, "recipe", *options, "--parallel.no-recompute", "--json"))
    (ring,) = facts["stash"]["ranks"]
    assert facts["layer"]["activations"]["moe"] < 135 * 2**20
    assert ring["bytes"] == ring["rows"] * ring["row_bytes"] + 8 * STASH_STATE
    assert facts["stash"]["entry_bytes"] == -(-ring["bytes"] // 48)
    assert facts["ranks"][0]["stash"] == ring["bytes"]
    for command in ("recipe", "graphs"):
        text = run(capsys, command, *options)
        assert " MiB of a rank, if not recomputed: a ring of" in text
        text = run(capsys, command, *options, "--parallel.no-recompute")
        assert f"{ring['rows']:,} rows of 48 layers and microbatches\n" in text
        assert "overflows in 0.0001 of steps; load of the busiest rank (max/mean): 1.2 is assumed\n" in text
        assert max(map(len, text.splitlines())) < 120
    file = tmp_path / "m"
    write_metrics(file, ep=8, stages=[], loads=[([1.2] * 48, [1.02]), ([1.2] * 48, [1.04])])
    text = run(capsys, "recipe", *options, "--parallel.no-recompute", "--load", str(file))
    assert f"1.030 +- 0.014 in {file}, as with model.moe.activation_stash 1.1" in text
    assert plan.main(["recipe", *options, "--load", str(tmp_path / "none")]) == 2
    assert "none: cannot be read (No such file or directory)" in capsys.readouterr().err


def test_the_value_of_the_option_gives_a_ring_as_large(tmp_path):
    loads = [([1.2] * 48, [1.02]), ([1.2] * 48, [1.04])]
    file = write_metrics(tmp_path / "m", ep=8, stages=[0] * 48, loads=loads)
    options = {"model": {"moe": {"dispatcher": "symmetric"}}, "parallel": {"ep": 8}}
    found = load_recipe(QWEN, options)
    stash = recipe_facts(found, 64, MeasuredLoad.read(file, found))["stash"]
    moe = replace(found.model.moe, activation_stash=stash["activation_stash"])
    stated = recipe_facts(replace(found, model=replace(found.model, moe=moe)), 64)["stash"]
    assert 0 <= stated["ranks"][0]["rows"] - stash["ranks"][0]["rows"] < 0.01 * 8192 * 49
