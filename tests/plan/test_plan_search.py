"""`fastmp plan search`: against estimates of every candidate; its report, recipe, and the time it takes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import product

import pytest
from marks import exhaustive, full

from fastmp.apps import cli
from fastmp.apps.layout_check import tiny
from fastmp.apps.plan_search import recipe_toml
from fastmp.config import (
    DataConfig,
    GPTConfig,
    LatentConfig,
    MoEConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.config.recipe import load_recipe
from fastmp.plan.graphs import graph_facts
from fastmp.plan.hardware import GPUS
from fastmp.plan.layout import make_schedule, problems
from fastmp.plan.memory import memory
from fastmp.plan.pipeline_time import pipeline_time, shorter
from fastmp.plan.search import SLOWEST, TOLERANCE, _Search, estimate, front_of, search
from fastmp.plan.search_report import describe_search, layout_name, search_facts
from fastmp.plan.shapes import shapes_of
from fastmp.plan.space import Candidate, Layout, Space, divide_layers
from fastmp.plan.step_time import step_time
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.simulate import Costs, simulate

DENSE = GPTConfig(
    num_layers=6, hidden_size=1024, num_heads=8, num_kv_heads=4, ffn_hidden_size=2816, vocab_size=32000,
    max_seq_len=4096, norm="rmsnorm", position="rope", activation="swiglu", linear_bias=False,
)  # fmt: skip
MOE = replace(DENSE, tie_embeddings=False, moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=1024))
LATENT = replace(
    MOE, num_kv_heads=None, dense_layers=(0,), mtp_depth=1,
    latent=LatentConfig(kv_rank=256, q_rank=512, nope_size=64, rope_size=32, value_size=64),
)  # fmt: skip
TWELVE = replace(
    MOE, hidden_size=1536, num_heads=12, num_kv_heads=12, moe=replace(MOE.moe, expert_ffn_hidden_size=768)
)


def recipe(model, batch, length=4096):
    return Recipe(
        model=model,
        data=DataConfig(seq_len=length),
        train=TrainConfig(global_batch_size=batch, dtype="bfloat16"),
    )


NARROW = {"cp": [1], "micro_batch_size": [1], "precision": ["dtype"]}
# model, GPUs, samples of a step, GPU, GiB, what is kept
SPACES = [
    (DENSE, 4, 16, "h100", 72, {"precision": ["dtype"], "micro_batch_size": [1, 2]}),
    (MOE, 4, 8, "h100", 72, {**NARROW, "vpp": [1, 2], "states": ["small"]}),
    (LATENT, 4, 8, "h800", 6, {**NARROW, "precision": ["fp8"], "vpp": [1], "states": ["small"]}),
    *full(
        [
            (DENSE, 8, 32, "a100", 3, {"micro_batch_size": [1, 4], "vpp": [1, 2], "cp": [1]}),
            (DENSE, 8, 8, "h100", 1.5, {"micro_batch_size": [1], "precision": ["fp8"]}),
            (DENSE, 16, 16, "v100", 30, {"micro_batch_size": [1], "schedule": ["1f1b"], "cp": [1, 2]}),
            (DENSE, 2, 64, "b200", 160, {"cp": [1], "states": ["classic"]}),
            (DENSE, 6, 12, "h200", 2, NARROW),
            (TWELVE, 6, 12, "h100", 10, {**NARROW, "vpp": [1], "states": ["small"]}),  # tp and etp of 3 and 6
            (DENSE, 4, 10, "h100", 3, {**NARROW, "vpp": [2]}),  # 5 microbatches for 2 ranks
            (
                DENSE,
                16,
                64,
                "h100",
                4,
                {"pp": [2, 4], "cp": [1], "micro_batch_size": [1], "graphs": ["none"]},
            ),
            (MOE, 8, 16, "h100", 72, {"pp": [1], "tp": [1, 2], "cp": [1], "micro_batch_size": [1]}),
            (MOE, 8, 16, "h100", 2.5, {**NARROW, "pp": [1, 2], "tp": [1], "vpp": [1]}),
            (MOE, 16, 16, "a100", 10, {"pp": [2], "tp": [2], "cp": [1], "vpp": [1], "graphs": ["none"]}),
            (MOE, 16, 64, "h100", 3, {"dispatcher": ["deepep"], "tp": [1], "cp": [1], "states": ["classic"]}),
            (LATENT, 8, 16, "h100", 4, {**NARROW, "tp": [2], "precision": ["fp8"], "states": ["small"]}),
            (LATENT, 16, 32, "b200", 3, {"ep": [8], "tp": [1], "cp": [1], "vpp": [1], "states": ["small"]}),
        ]
    ),
    *exhaustive(
        [
            (MOE, 8, 32, "h800", 4, {"pp": [2], "tp": [1], "micro_batch_size": [1], "states": ["small"]}),
            (MOE, 4, 64, "b200", 5, {"schedule": ["dualpipe_v"], "micro_batch_size": [1, 2]}),
            (MOE, 8, 8, "h100", 72, {"dispatcher": ["symmetric"], "cp": [1], "states": ["classic"]}),
            (LATENT, 8, 32, "h100", 5, {**NARROW, "pp": [2], "graphs": ["none"]}),
            (LATENT, 4, 8, "h200", 72, {**NARROW, "recompute": ["kv", "full"], "vpp": [1, 2], "pp": [1, 2]}),
        ]
    ),
]


def static(made, gpus):
    """Return the bytes of each rank's static buffers of graphs that hold no activation."""
    if not made.graphs.enabled:
        return [0] * made.parallel.pp
    name = "gradient_bytes" if made.graphs.scope is None else "input_bytes"
    return [rank[name] for rank in graph_facts(made, gpus)["ranks"]]


@pytest.mark.parametrize(("model", "gpus", "batch", "gpu", "gib", "fixed"), SPACES)
def test_the_optimum_is_that_of_estimating_every_candidate(model, gpus, batch, gpu, gib, fixed):
    space, limit = Space(recipe(model, batch), gpus, GPUS[gpu], fixed), gib * 2**30
    found, every = search(space, limit), []
    for own in space.candidates():
        made = space.recipe_of(own)
        if not problems(made, gpus):
            shapes = shapes_of(made, gpus)
            orders = make_schedule(made.parallel, shapes.num_microbatches).orders()
            held = max(
                each.total + beside
                for each, beside in zip(memory(made, shapes, orders), static(made, gpus), strict=True)
            )
            if held <= limit:
                every.append((step_time(made, gpus, GPUS[gpu]).seconds, held, own.layout))
    assert len(every) > 20 and found.estimated < len(every)
    fastest = min(every)[0]
    assert found.best[0].step.seconds == pytest.approx(fastest, rel=1e-12)
    wider, layouts = 1 + TOLERANCE, {}
    for seconds, held, layout in every:
        layouts[layout] = min(seconds, layouts.get(layout, math.inf))
        if seconds <= SLOWEST * fastest:
            assert any(
                own.step.seconds <= seconds * wider and own.memory <= held * wider for own in found.front
            )
    times = sorted(seconds for seconds in layouts.values() if seconds <= SLOWEST * fastest)[:10]
    own_times = [own.step.seconds for own in found.best]
    assert own_times == pytest.approx(times, rel=TOLERANCE)
    points = [(own.step.seconds, own.memory) for own in found.front]
    assert points == front_of(points)


def test_a_candidate_fits_into_its_own_memory():
    made = recipe(replace(DENSE, num_layers=8), 16)
    kept = {
        **{"tp": [1], "cp": [1], "pp": [2], "micro_batch_size": [1, 8], "precision": ["dtype"]},
        **{"recompute": ["full"], "schedule": ["zero_bubble"], "graphs": ["none"], "states": ["classic"]},
    }
    space = Space(made, 2, GPUS["h100"], {**kept, "vpp": [2, 4]})
    for own in space.candidates():  # at the fullest moment the last chunk, with the loss, may hold nothing
        alone = Space(made, 2, GPUS["h100"], {axis: [value] for axis, value in own.facts().items()})
        assert search(alone, estimate(space, own).memory).best, own


def test_sizes_are_those_that_divide_the_gpus_and_that_the_layout_check_accepts():
    """Groups of tp and of etp are nested; 4,096 tokens are 2,048 of two context-parallel ranks."""
    space = Space(recipe(TWELVE, 12), 6, GPUS["h100"])
    every = (Layout(*sizes) for sizes in product((1, 2, 3, 6), repeat=5))
    nested = (
        own
        for own in every
        if max(own.tp, own.etp) % min(own.tp, own.etp) == 0
        and own.cp < 3
        and 6 % (own.tp * own.cp * own.pp) == 0
    )
    rest = (1, "alltoall", "dtype", "full", 1, "1f1b", False, "none", "classic")
    fitting = {own for own in nested if not problems(space.recipe_of(Candidate(*own, *rest)), 6)}
    assert {*space.layouts()} == fitting and {own.tp for own in fitting} == {1, 2, 3, 6}
    assert {own.etp for own in fitting} == {1, 2, 3, 6}
    longer = Space(recipe(TWELVE, 12, 12288), 6, GPUS["h100"])
    assert {own.cp for own in longer.layouts()} == {1, 2, 3, 6}


def test_groups_divide_servers_or_are_whole_ones():
    servers = [*Space(recipe(TWELVE, 48, 12288), 48, GPUS["h100"]).layouts()]  # of 8 GPUs
    assert {own.tp for own in servers} == {1, 2, 4} and {own.etp for own in servers} == {1, 2, 4, 8}
    assert {own.tp * own.cp for own in servers} == {1, 2, 4, 8, 16, 24}
    three = replace(TWELVE, moe=replace(TWELVE.moe, num_experts=24))
    experts = {own.etp * own.ep for own in Space(recipe(three, 48, 12288), 48, GPUS["h100"]).layouts()}
    assert experts == {1, 2, 4, 8, 16, 24, 48}  # not 3, 6 or 12
    one = [*Space(recipe(TWELVE, 48, 12288), 12, GPUS["gb200"]).layouts()]
    assert {own.tp for own in one} == {1, 2, 3, 4, 6, 12}
    within = Space(recipe(TWELVE, 48), 48, GPUS["h100"])
    assert "symmetric" in within.dispatchers(Layout(1, 1, 1, 4, 2))
    assert "symmetric" not in within.dispatchers(Layout(1, 1, 1, 2, 3))  # some groups are in two servers


def test_sequence_parallelism_follows_tp_where_it_divides_the_sequence():
    space = Space(recipe(TWELVE, 12), 6, GPUS["h100"], {"recompute": ["full"]})
    own = {own.tp: own for own in space.candidates() if own.cp == 1}
    assert {tp: space.recipe_of(each).parallel.sequence_parallel for tp, each in own.items()} == {
        1: False, 2: True, 3: False, 6: False,
    }  # fmt: skip


def test_graphs_hold_whole_steps_where_the_dispatcher_in_use_has_no_eager_segment():
    """Without expert parallelism that is not the one that the recipe names."""
    space = Space(recipe(MOE, 8), 8, GPUS["h100"])
    whole = [
        (layout, dispatcher)
        for layout in (
            Layout(2, 1, 1, 1, 1),
            Layout(2, 1, 1, 1, 2),
            Layout(1, 1, 1, 1, 2),
            Layout(2, 1, 1, 2, 2),
        )
        for dispatcher in space.dispatchers(layout)
        if "full_step" in space.graphs(layout, dispatcher, False)
    ]
    assert whole == [
        (Layout(2, 1, 1, 1, 1), "alltoall"),
        (Layout(2, 1, 1, 1, 2), "alltoall"),  # shared tokens of one sequence
        (Layout(2, 1, 1, 2, 2), "symmetric"),
    ]
    for layout, dispatcher in whole:
        rest = (1, dispatcher, "dtype", "none", 1, "1f1b", False, "full_step", "classic")
        assert "experts" in graph_facts(space.recipe_of(Candidate(*layout, *rest)), 8)["captured"]
    assert not Space(recipe(MOE, 8), 8, GPUS["h100"], {"dispatcher": ["deepep"]}).dispatchers(whole[0][0])


def test_static_buffers_of_graphs_count():
    """Gradients of spans as of a shorter step, which holds as many; the ids and targets of a whole step."""
    made, number = recipe(replace(DENSE, num_layers=8), 2200), 2200
    kept = {**NARROW, "tp": [1], "pp": [2], "vpp": [1], "schedule": ["1f1b"], "recompute": ["none"]}
    space = Space(made, 2, GPUS["h100"], {**kept, "states": ["classic"]})
    none, layers, whole = (estimate(space, own) for own in space.candidates())
    gradient = 4096 * 1024 * 2
    assert layers.memory - none.memory == static(space.recipe_of(layers.candidate), 2)[0] == gradient
    assert whole.memory - none.memory == number * 4096 * 16
    only = Space(made, 2, GPUS["h100"], {**space.fixed, "graphs": ["layers"]})
    assert search(only, 2**40).best[0].memory == layers.memory
    both = Space(recipe(DENSE, 10), 2, GPUS["h100"], {**space.fixed, "graphs": ["layers", "full_step"]})
    least = min(estimate(both, own).memory for own in both.candidates())
    assert search(both, least).best[0].candidate.graphs == "full_step"  # as fast, with fewer bytes


def test_interleaved_chunks_take_the_smallest_microbatch_groups_that_fit():
    """5 microbatches do not run in groups of 2, the default: the last one would be alone."""
    fixed = {**NARROW, "pp": [2], "tp": [1], "vpp": [2], "schedule": ["1f1b"]}
    space = Space(recipe(DENSE, 10), 4, GPUS["h100"], fixed)
    best = search(space, 72 * 2**30).best[0].candidate
    assert space.recipe_of(best).parallel.microbatch_group_size == 3
    assert space.recipe_of(replace(best, vpp=1)).parallel.microbatch_group_size is None
    v = replace(best, schedule="dualpipe_v")
    assert space.recipe_of(v).parallel.microbatch_group_size is None
    few = search(Space(recipe(DENSE, 2), 4, GPUS["h100"], fixed), 72 * 2**30)
    assert not few.best and "a last group of 1 for group_size 2" in next(iter(few.rejected))
    facts = search_facts(space, 72 * 2**30)
    assert facts["best"][0]["microbatch_group_size"] == 3
    assert "schedule 1f1b x2 in groups of 3," in "\n".join(describe_search(facts))


MIXED = replace(MOE, num_layers=8, dense_layers=(0, 2, 4, 6), ffn_hidden_size=16384)
TINY = replace(
    MOE, hidden_size=256, num_heads=4, num_kv_heads=4, moe=replace(MOE.moe, expert_ffn_hidden_size=128)
)


@pytest.mark.parametrize(
    ("model", "length", "network", "layout"),
    [
        (MIXED, 4096, 5e9, Layout(1, 1, 1, 4, 4)),  # dense layers hide exchanges of the others
        (TINY, 512, 2e9, Layout(1, 1, 1, 2, 8)),  # so do launches
        (TINY, 128, 5e10, Layout(1, 1, 2, 4, 2)),  # a rank has the embedding and the loss alone
    ],
)
def test_no_estimate_is_below_its_bounds(model, length, network, layout):
    kept = {"overlap": [True], "micro_batch_size": [4 if layout.pp > 1 else 1], "recompute": ["none"]}
    space = Space(recipe(model, 64, length), 16, replace(GPUS["h100"], network=network), kept)
    running, number = _Search(space, math.inf, 1), 0
    for node in running._nodes(layout):
        for (seconds, held), own in running._open(node):
            found, number = estimate(space, own), number + 1
            assert seconds <= found.step.pipeline and held <= found.memory, own
            assert running._node_time(node) <= found.step.seconds
    assert number > 5


def test_equal_searches_give_equal_results():
    one, two = (search(Space(recipe(DENSE, 16), 4, GPUS["h100"], SPACES[0][-1]), 2**36) for _ in range(2))
    assert one == two


def test_layers_are_divided_so_that_ranks_have_equal_work():
    deepseek = load_recipe("configs/deepseek-v3.toml")
    assert divide_layers(deepseek.model, 4096, 16, 1, "looped") == deepseek.parallel.stage_layers
    for pp, vpp, placement in ((4, 1, "looped"), (4, 2, "looped"), (2, 2, "v"), (3, 1, "looped")):
        found = divide_layers(DENSE, 4096, pp, vpp, placement)
        assert found is None or sum(found) == DENSE.num_layers
    assert divide_layers(replace(DENSE, vocab_size=64), 4096, 3, 1, "looped") is None


@pytest.mark.parametrize(
    ("name", "vpp", "overlap", "group_size"),
    [
        ("1f1b", 1, False, None),
        ("1f1b", 2, True, 6),  # the last group has 4 microbatches
        ("zero_bubble", 2, False, None),
        ("dualpipe_v", 2, True, None),
    ],
)
def test_long_steps_are_continued_from_shorter_ones(name, vpp, overlap, group_size):
    schedule = Schedule(4, 1600, vpp, group_size, name, overlap)
    stages = 4 * vpp
    forward = tuple(1.0 + 0.1 * (stage == stages - 1) for stage in range(stages))
    hidden = tuple((0.2,) * stages for _ in range(stages)) if overlap else 0.0
    costs = Costs(forward, forward, forward, 0.01, hidden)
    run = simulate(schedule.orders(), costs, pairs=schedule.all_pairs(), placement=schedule.placement)
    found = pipeline_time(schedule, costs)
    assert shorter(schedule).num_microbatches < 100
    assert found.makespan == pytest.approx(run.makespan, rel=1e-9)
    assert found.busy == pytest.approx(run.busy, rel=1e-9)
    for rank in range(4):
        assert shorter(schedule).peak_in_flight(rank) == schedule.peak_in_flight(rank)


@pytest.mark.exhaustive
def test_two_thousand_gpus_and_61_layers_take_less_than_a_minute_of_one_core():
    space = Space(
        replace(load_recipe("configs/deepseek-v3.toml"), parallel=ParallelConfig()), 2048, GPUS["h100"]
    )
    start = time.process_time()
    found = search(space, 0.9 * GPUS["h100"].capacity)
    assert time.process_time() - start < 60.0
    assert len(found.best) == 10 and len(found.front) > 3 and found.nodes > 40_000
    best = found.best[0]
    assert best.step.seconds < 19.9 and best.candidate.ep >= 32  # published: 19.9 s on H800s
    assert estimate(space, best.candidate).step.seconds == best.step.seconds


SMALL = ["plan", "search", "gpt-small", "--gpus", "8", "--hardware", "h100"]


def test_the_command_prints_a_table_and_writes_a_recipe(capsys, tmp_path):
    out = tmp_path / "best.toml"
    assert cli.main([*SMALL, "--out", str(out), "--why", "tp=8"]) == 0
    text = capsys.readouterr().out
    assert (
        "estimates; nothing of them was measured" in text and "takes longest" in text and "nearest   " in text
    )
    assert "why       tp 8 divides nothing here: num_heads 6 is not divisible by tp 8" in text
    assert cli.main([*SMALL, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    best, made = facts["best"][0], load_recipe(out)
    assert made.parallel.pp == best["pp"] and made.data.micro_batch_size == best["micro_batch_size"]
    assert step_time(made, 8, GPUS["h100"]).seconds == pytest.approx(best["seconds"])
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert facts["best"][0]["front"] and len(facts["front"]) >= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--why", "pp=1"], "why       with pp 1 the fastest is dp only"),
        (["--tp", "1", "--why", "tp=2"], "why       tp 2 contradicts the options given, which keep 1"),
        (["--memory", "0.001"], "no layout fits:"),
        (["--gpus", "7"], "a step of 1,024 tokens is not the same number of samples for each data-parallel"),
        (["--tp", "3"], "no sizes that the options keep divide 8 GPUs"),
        (["--parallel.no-recompute", "--why", "recompute=full"], "contradicts the options given"),
        (["--graphs.no-enabled", "--optimizer.states", "classic"], "classic"),
    ],
)
def test_options_narrow_the_search_and_questions_are_answered(options, expected, capsys):
    status = cli.main([*SMALL, *options])
    text = capsys.readouterr().out
    assert expected in text and status == ("no layout fits:" in text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--why", "tp"], "--why: expected AXIS=VALUE with an axis of tp, cp"),
        (["--why", "tp=x"], "--why: expected a number for tp, got 'x'"),
        (
            ["--why", "schedule=zbv"],
            "--why: expected schedule of '1f1b', 'zero_bubble', 'dualpipe_v', got 'zbv'",
        ),
        (["--why", "overlap=yes"], "--why: expected overlap of 'false', 'true', got 'yes'"),
        (
            ["--optimizer.states", "classic", "--optimizer.grad-dtype", "bfloat16"],
            "the options leave no optimizer.states to search: expected one of 'classic', 'small'",
        ),
        (
            ["--hardware", "a100", "--train.precision", "fp8"],
            "no train.precision to search: expected one of 'd",
        ),
        (["--parallel.tp-overlap"], "a search chooses parallel.tp_overlap itself: leave out"),
        (["--graphs.scope", "full"], "a search chooses graphs.scope itself: leave out --graphs.scope"),
        (["--tokens-per-step", "1000"], "--tokens-per-step 1000 is no multiple of data.seq_len 64"),
    ],
)
def test_wrong_options_say_what_is_expected(options, expected, capsys):
    assert cli.main([*SMALL, *options]) == 2
    assert expected in capsys.readouterr().err
    assert cli.main(["plan", "search", "gpt-smal", "--gpus", "8"]) == 2
    assert "did you mean gpt-small?" in capsys.readouterr().err


def test_experts_with_biases_or_fp8_have_symmetric_dispatch_without_a_stash():
    made = recipe(replace(MOE, moe=replace(MOE.moe, linear_bias=True)), 8)
    space = Space(made, 4, GPUS["h100"], {"cp": [1], "micro_batch_size": [1], "dispatcher": ["symmetric"]})
    own = next(own for own in space.candidates() if own.ep > 1)
    assert space.recipe_of(own).model.moe.activation_stash == 0.0
    assert search(space, 72 * 2**30).best
    made = recipe(MOE, 8)
    space = Space(made, 4, GPUS["h100"], {**space.fixed, "precision": ["fp8"], "ep": [4]})
    assert search(space, 72 * 2**30).best[0].candidate.dispatcher == "symmetric"


def test_names_of_layouts_tell_them_apart():
    layouts = list(Space(recipe(MOE, 8), 8, GPUS["h100"]).layouts())
    assert len({layout_name(each._asdict()) for each in layouts}) == len(layouts)


def test_every_recipe_survives_being_written(tmp_path):
    for name in ("deepseek-v3", "gpt-oss-20b", "moe-small", "bert-336m", "kimi-k2"):
        made, file = load_recipe(f"configs/{name}.toml"), tmp_path / "again.toml"
        file.write_text(recipe_toml(made, "a comment\nof two lines"))
        assert load_recipe(file) == made


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "llama-3-8b", "gpt-oss-20b"])
def test_the_tiny_form_of_a_layout_fits(name):
    made, ranks = tiny(load_recipe(f"configs/{name}.toml"))
    assert not problems(made, ranks) and ranks <= 8
    with pytest.raises(ValueError, match="an encoder has none"):
        tiny(load_recipe("configs/bert-336m.toml"))


@pytest.mark.full
def test_the_check_trains_a_tiny_step_on_forked_ranks(capsys):
    options = ["--pp", "2", "--parallel.schedule", "1f1b", "--check"]
    assert cli.main(["plan", "search", "moe-small", "--gpus", "8", "--ep", "2", *options]) == 0
    text = capsys.readouterr().out
    assert "check     a step of 2 tiny layers" in text and "as on one rank" in text


def test_out_into_no_directory_is_an_error_before_the_search(tmp_path, capsys):
    out = str(tmp_path / "none" / "best.toml")
    assert (
        cli.main(["plan", "search", "llama-3-8b", "--gpus", "2048", "--hardware", "h100", "--out", out]) == 2
    )
    assert f"--out: {tmp_path / 'none'} is no directory; make it first" in capsys.readouterr().err
