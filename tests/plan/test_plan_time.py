"""`fastmp plan time`: GEMMs, links and steps against what can be said by hand; bytes against counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.apps import cli
from fastmp.config import (
    DataConfig,
    GPTConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from fastmp.config.dispatchers import NCCL_MULTIPROCESSORS
from fastmp.plan.hardware import GPUS, NETWORK_HOP, NVLINK_HOP, REACHED, START, SUMMED, link
from fastmp.plan.kernels import (
    FASTMP,
    FP8_GEMMS,
    FP8_WGRADS,
    LAUNCH,
    MEMORY,
    UNFUSED,
    Gemm,
    gemm_time,
)
from fastmp.plan.layer_time import FORWARD, INPUT, REPEATED, WEIGHT, Links, _other_kernels
from fastmp.plan.shapes import shapes_of
from fastmp.plan.step_time import (
    IMBALANCE,
    ONCE,
    hidden_by_overlap,
    layer_segment_costs,
    step_model,
    step_time,
)

H100, V100 = GPUS["h100"], GPUS["v100"]
LLAMA = GPTConfig(
    num_layers=8, hidden_size=1024, num_heads=8, ffn_hidden_size=2816, vocab_size=32000, max_seq_len=512,
    norm="rmsnorm", position="rope", activation="swiglu", linear_bias=False, tie_embeddings=False,
)  # fmt: skip


def recipe(model=LLAMA, batch=8, micro=1, optimizer=None, **layout):
    return Recipe(
        model=model,
        parallel=ParallelConfig(**layout),
        data=DataConfig(seq_len=512, micro_batch_size=micro),
        optimizer=optimizer or OptimizerConfig(),
        train=TrainConfig(global_batch_size=batch, dtype="bfloat16"),
    )


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_gpu_names_its_source_and_has_rates_of_one_direction(gpu):
    assert "data sheet" in gpu.source or "white paper" in gpu.source
    assert gpu.single < gpu.half and gpu.network < gpu.nvlink < gpu.memory_bandwidth


def test_capacities_are_just_above_what_cuda_reports():
    """GiB that torch has as "total capacity" in reports of full memory."""
    reported = {"v100": 31.74, "a100": 79.15, "h100": 79.11, "h800": 79.11, "h200": 139.8, "b200": 178.35}
    reported |= {"gb200": 184.3, "rtx4090": 23.64}
    for name, gpu in GPUS.items():
        assert reported[name] <= gpu.capacity / 2**30 <= 1.016 * reported[name]


def test_a_product_takes_waves_of_tiles():
    full = Gemm(256 * 8, 128 * 10, 4096)  # one for each multiprocessor
    rate = V100.gemms * V100.half / V100.processors
    tile = 2 * 256 * 128 * 4096 / rate + 256 * 128 * 2 / (MEMORY * V100.memory_bandwidth / V100.processors)
    assert gemm_time(V100, full, 2) == pytest.approx(LAUNCH + tile)
    assert gemm_time(V100, full._replace(rows=256 * 8 + 1), 2) > gemm_time(V100, full, 2) * 1.05
    short = Gemm(8192, 1536, 192)  # the writing of tiles counts
    assert rate_of(V100, short) < 0.6 * rate_of(V100, Gemm(8192, 1536, 6144)) < 0.6 * V100.gemms * V100.half


def rate_of(gpu, product):
    return 2 * product.rows * product.columns * product.sum * product.batch / gemm_time(gpu, product, 2)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_no_product_beats_its_floors(gpu):
    for m in (8, 100, 1024, 8192):
        for k in (64, 1000, 8192):
            each = Gemm(m, 4096, k)
            moved = (m * k + k * 4096 + m * 4096) * 2 / (MEMORY * gpu.memory_bandwidth)
            assert gemm_time(gpu, each, 2) >= max(2 * m * k * 4096 / (gpu.gemms * gpu.half), moved)
            assert gemm_time(gpu, each.backward_weight(True), 2) > gemm_time(gpu, each.backward_weight(), 2)


def test_links_know_the_doors_of_servers():
    inside, across = link(H100, range(8)), link(H100, range(16))
    assert (inside.hop, inside.bandwidth, inside.sums) == (NVLINK_HOP, REACHED * 450e9, True)
    assert (across.hop, across.bandwidth, across.sums) == (NETWORK_HOP, REACHED * 8 * 50e9, False)
    assert link(H100, range(0, 64, 8)).bandwidth == REACHED * 50e9
    assert link(V100, range(0, 512, 8)).bandwidth == REACHED * 2 * 6.25e9  # two of a group in a server of 16
    size = 1e9
    assert inside.all_reduce(size) == pytest.approx(START + 2 * NVLINK_HOP + size / (SUMMED * 450e9))
    published = {2: 370e9, 4: 370e9, 5: 420e9, 6: 440e9, 7: 460e9, 8: 480e9}  # of nccl-tests on H100s
    for n, rate in published.items():
        ours = 2 * (n - 1) / n * size / link(H100, range(n)).all_reduce(size)
        assert ours == pytest.approx(rate, rel=0.1), n
    ring = link(V100, range(8))
    assert ring.all_reduce(size) == pytest.approx(START + 14 * NVLINK_HOP + 14 / 8 * size / ring.bandwidth)
    assert across.all_reduce(1.0) == pytest.approx(START + 8 * NETWORK_HOP, rel=1e-3)  # a tree
    # Of an exchange among 16 ranks, 8 of 15 pieces are for the other server.
    across = link(H100, range(16), crossing=lambda inside: (16 - inside) / 15)
    assert across.bandwidth == pytest.approx(REACHED * 50e9 * 15 / 8)
    assert link(H100, [3]).all_reduce(size) == link(H100, [3]).passes(size) == 0.0


def test_a_limit_of_nodes_bounds_the_bytes_between_servers():
    """DeepEP sends a token once to each of `group_topk` servers; an all-to-all sends each of its pairs."""

    def crossing(dispatcher: str, group_topk: int) -> float:
        """Rows that a token sends over the network in a dispatch, in the mean."""
        moe = MoEConfig(
            num_experts=64, top_k=8, expert_ffn_hidden_size=512, dispatcher=dispatcher,
            num_groups=4, group_topk=group_topk, group_score="megatron",
        )  # fmt: skip
        shapes = shapes_of(recipe(replace(LLAMA, moe=moe), batch=32, ep=32), 32)
        spec, sizes = shapes.dispatcher, shapes.dispatch_sizes
        joined = Links(H100, shapes)[spec.exchange_group]
        rows = sizes.reached if dispatcher == "deepep" else sizes.top_k
        return REACHED * H100.network / joined.bandwidth * rows * 31 / 32

    assert crossing("alltoall", 1) == pytest.approx(crossing("alltoall", 4)) == pytest.approx(8 * 3 / 4)
    for group_topk in (1, 2, 3):
        assert crossing("deepep", group_topk) <= group_topk * 3 / 4 + 1e-9
    assert crossing("deepep", 1) == pytest.approx(3 / 4)
    assert crossing("deepep", 2) < crossing("deepep", 3) < crossing("deepep", 4) < 3


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, {}),
        (8, {"tp": 4, "sequence_parallel": True, "recompute": True}),
        (16, {"tp": 2, "pp": 4, "vpp": 2, "schedule": "zero_bubble"}),
        (16, {"cp": 2, "pp": 2, "shard_recompute_input": True, "recompute": True}),
    ],
)
def test_the_parts_are_the_step(size, layout):
    found = step_time(recipe(batch=64, **layout), size, H100)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(took > 0 for took in found.parts.values())
    assert any(phase == REPEATED for phase, _ in found.parts) == bool(layout.get("recompute"))
    assert 0.0 < found.mfu < H100.gemms
    assert step_time(recipe(batch=64, **layout), size, GPUS["b200"]).seconds < found.seconds


EXPERTS = replace(LLAMA, moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=1024))


@pytest.mark.parametrize("layout", [{"ep": 8}, {"ep": 8, "pp": 2, "vpp": 2}, {"ep": 4, "tp": 2, "etp": 2}])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "symmetric"])
def test_with_overlap_the_parts_are_the_step_and_exchanges_are_less(layout, dispatcher):
    model = replace(EXPERTS, moe=replace(EXPERTS.moe, dispatcher=dispatcher))
    own = recipe(model, batch=64, **layout)
    shapes = shapes_of(own, 16)
    of_layer = layer_segment_costs(replace(shapes, model=model.layers[0]), H100)
    before = step_time(own, 16, H100)
    after = step_time(recipe(model, batch=64, overlap_experts=True, **layout), 16, H100)
    for each in (before, after):
        assert sum(each.parts.values()) == pytest.approx(each.seconds)
    groups = ("ep", "etp", "etp-ep")
    sent = [sum(took for (_, what), took in each.parts.items() if what in groups) for each in (before, after)]
    assert sent[1] < 0.8 * sent[0] and after.seconds < before.seconds
    assert [section.exchange for section in of_layer] == [False, True, False, True]
    assert all(min(section[3:]) >= 0.0 for section in of_layer)
    hidden, exchanged = (
        hidden_by_overlap(of_layer * 4, of_layer * 4),
        sum(s.forward + s.backward_input for s in of_layer if s.exchange),
    )
    assert 0.0 < hidden <= 4 * exchanged * (1 + 1e-9)
    assert 0.0 < hidden_by_overlap(of_layer * 2, of_layer * 4) < hidden
    assert hidden_by_overlap((), of_layer) == 0.0


@pytest.mark.parametrize(("dispatcher", "held"), [("alltoall", NCCL_MULTIPROCESSORS), ("deepep", 20)])
def test_overlap_hides_no_more_than_the_multiprocessors_left_to_compute(dispatcher, held):
    """Of what a schedule hides, GEMMs lose the share of multiprocessors that the exchange holds."""
    model = replace(EXPERTS, moe=replace(EXPERTS.moe, dispatcher=dispatcher))
    own = recipe(model, batch=64, ep=8, overlap_experts=True)
    layer = layer_segment_costs(replace(shapes_of(own, 16), model=model.layers[0]), H100)
    hidden = hidden_by_overlap(layer * 8, layer * 8)
    costs = step_model(own, 16, H100).costs
    assert costs.saved(0, 0) == pytest.approx(hidden * (132 - held) / 132)


def test_gradients_behind_the_backward_take_multiprocessors_of_it():
    """All but a bucket is behind the backward, which takes 16 of 132 longer for it."""
    found = {}
    for overlap in (True, False):
        made = recipe(batch=256, micro=32, optimizer=OptimizerConfig(overlap=overlap, bucket_size=10**6))
        found[overlap] = step_time(made, 8, H100).parts[ONCE, "gradients"]
    assert NCCL_MULTIPROCESSORS / 132 < found[True] / found[False] < NCCL_MULTIPROCESSORS / 132 + 0.02


def test_ranks_wait_for_the_busiest_experts():
    own = recipe(EXPERTS, batch=64, ep=8)
    even, half = (step_time(own, 16, H100, load=load) for load in (1.0, 1.5))
    layer = layer_segment_costs(replace(shapes_of(own, 16), model=EXPERTS.layers[0]), H100)
    routed = sum(sum(part[3:]) for part in layer[1:])
    assert half.seconds - even.seconds == pytest.approx(
        0.5 * 8 * routed * shapes_of(own, 16).num_microbatches
    )
    imbalance = sum(took for (_, what), took in half.parts.items() if what == IMBALANCE)
    assert imbalance == pytest.approx(half.seconds - even.seconds)
    assert not any(what == IMBALANCE for _, what in even.parts)
    again = recipe(EXPERTS, batch=64, ep=8, recompute=True)
    parts = step_time(again, 16, H100, load=1.5).parts
    assert parts[REPEATED, IMBALANCE] == parts[FORWARD, IMBALANCE] > 0
    # An all-gather sends as much as with even experts: their GEMMs take longer, and the sorting of rows.
    gathered = replace(EXPERTS, moe=replace(EXPERTS.moe, dispatcher="allgather"))
    own = recipe(gathered, batch=64, ep=8, recompute=True)
    busy = step_time(own, 16, H100, load=1.5).parts
    layer = layer_segment_costs(replace(shapes_of(own, 16), model=gathered.layers[0]), H100)
    for place, phase in enumerate((FORWARD, INPUT, WEIGHT), 3):
        took = 8 * shapes_of(own, 16).num_microbatches * sum(part[place] for part in layer[1:])
        assert busy[phase, IMBALANCE] == pytest.approx(0.5 * (took - busy.get((phase, "etp-ep"), 0.0)))
    assert busy[REPEATED, "etp-ep"] < busy[FORWARD, "etp-ep"]
    assert busy[REPEATED, IMBALANCE] == busy[FORWARD, IMBALANCE] > 0
    # A dense model and experts of one rank have nothing to wait for.
    for each in (recipe(batch=64), recipe(EXPERTS, batch=64)):
        assert step_time(each, 16, H100, load=2.0) == step_time(each, 16, H100)


def test_the_command_reads_the_load_of_a_run(tmp_path, capsys):
    """Four layers of a tiny recipe, whose busiest rank has 1.2 and 1.6 times the mean, 1.4 together."""
    file = tmp_path / "metrics.jsonl"
    lines = [{"kind": "run", "step": 0, "ep": 4, "expert_stages": []}]
    for step, load in enumerate((1.2, 1.6), 1):
        of_rank = {"stage_load": [load], "stage_spread": [0.0]}
        lines.append({"kind": "experts", "step": step, "rank_load": [load] * 4, **of_rank})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["plan", "time", "configs/moe-small.toml", "--world-size", "4", "--ep", "4", "--json"]
    arguments += ["--data.micro-batch-size", "1"]
    found = []
    for options in ([], ["--load", str(file), "--trace", str(tmp_path / "step.json")]):
        assert cli.main([*arguments, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    even, busy = found
    assert (even["load"], busy["load"]) == (1.0, pytest.approx(1.4))
    assert "expert imbalance" not in even["parts"]
    wait = sum(busy["parts"]["expert imbalance"].values())
    assert busy["seconds"] - even["seconds"] == pytest.approx(wait)
    trace = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    traced = sum(each["dur"] for each in trace if each["name"] == "expert imbalance")
    assert traced / 1e6 == pytest.approx(wait)
    file.write_text("")
    assert cli.main([*arguments, "--load", str(file)]) == 2
    assert 'expected two or more "experts" records' in capsys.readouterr().err


def test_the_sections_of_a_layer_are_all_of_it():
    """The same layers twice take twice their sections more."""
    for layout in ({"ep": 8}, {"ep": 1}):
        once = recipe(EXPERTS, **layout)
        twice = replace(once, model=replace(EXPERTS, num_layers=16))
        shapes = replace(shapes_of(once, 8), model=EXPERTS.layers[0])
        own = sum(sum(section[3:]) for section in layer_segment_costs(shapes, H100))
        work = [
            sum(took for (phase, _), took in step_time(each, 8, H100).parts.items() if phase != ONCE)
            for each in (once, twice)
        ]
        assert work[1] - work[0] == pytest.approx(8 * own)


def test_a_pipeline_idles_as_the_formula_says():
    """With layers alone and equal stages the bubble is (pp - 1) / microbatches."""
    model = replace(LLAMA, num_layers=128, vocab_size=64)
    found = step_time(recipe(model, batch=32, micro=1, pp=4), 4, H100)
    assert found.bubble == pytest.approx(3 / 32, rel=0.05)  # messages take time
    alone = step_time(recipe(model, batch=32, micro=1), 1, H100)
    assert found.seconds == pytest.approx(alone.seconds / 4 * (1 + 3 / 32), rel=0.03)
    assert found.parts[ONCE, "pipeline idle"] == pytest.approx(found.seconds * 3 / 35, rel=0.05)


def test_gradients_hide_behind_the_backward():
    layout = {"batch": 16, "micro": 1}
    beside = step_time(recipe(**layout), 16, H100)
    behind = step_time(recipe(optimizer=OptimizerConfig(overlap=False), **layout), 16, H100)
    assert beside.parts[ONCE, "gradients"] < behind.parts[ONCE, "gradients"]
    forward = sum(took for (phase, _), took in beside.parts.items() if phase == FORWARD)
    assert behind.seconds - beside.seconds > 0.0 < forward


RATES = ("half", "memory_bandwidth", "nvlink", "network")


@settings(max_examples=15, deadline=None)
@given(
    gpu=st.sampled_from([*GPUS.values()]),
    kernels=st.sampled_from([FASTMP, UNFUSED]),
    axes=st.sampled_from(
        [{}, {"tp": 4}, {"tp": 16}, {"cp": 2, "pp": 2}, {"pp": 4, "schedule": "zero_bubble"}]
    ),
    options=st.fixed_dictionaries({"recompute": st.booleans(), "sequence_parallel": st.booleans()}),
    experts=st.booleans(),
    shard=st.booleans(),
    times=st.sampled_from([1.01, 1.3, 4.0]),
)
def test_a_faster_part_never_slows_a_step_and_more_work_never_speeds_it(
    gpu, kernels, axes, options, experts, shard, times
):
    moe = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=256) if experts else None
    model = replace(LLAMA, num_heads=16, moe=moe)
    options["sequence_parallel"] &= "tp" in axes
    made = recipe(model, batch=32, optimizer=OptimizerConfig(shard=shard), **axes, **options)
    seconds = step_time(made, 16, gpu, kernels).seconds
    for rate in RATES:
        faster = replace(gpu, **{rate: getattr(gpu, rate) * times})
        assert step_time(made, 16, faster, kernels).seconds <= seconds * (1 + 1e-9), rate
    for more in (
        replace(made, model=replace(model, num_layers=16)),
        replace(made, model=replace(model, vocab_size=64000)),
        replace(made, train=replace(made.train, global_batch_size=64)),
    ):
        assert step_time(more, 16, gpu, kernels).seconds >= seconds


def test_fp8_has_faster_gemms_and_quantisers(capsys):
    made, found = recipe(batch=64, micro=8), {}
    for precision in ("dtype", "fp8"):
        changed = replace(made, train=replace(made.train, precision=precision))
        found[precision] = step_time(changed, 8, H100).parts
    exact, fp8 = found["dtype"], found["fp8"]
    for phase in (FORWARD, INPUT):
        assert 0.4 * exact[phase, "GEMMs"] < fp8[phase, "GEMMs"] < 0.95 * exact[phase, "GEMMs"]
        assert fp8[phase, "quantisers"] > 0 and (phase, "quantisers") not in exact
    assert fp8[WEIGHT, "GEMMs"] == exact[WEIGHT, "GEMMs"] and fp8[ONCE, "quantisers"] > 0
    of_others = step_time(changed, 8, H100, FP8_WGRADS).parts
    layers = exact[WEIGHT, "GEMMs"] - of_others[WEIGHT, "GEMMs"]
    assert 0.25 * exact[WEIGHT, "GEMMs"] < layers < (1 - H100.gemms / FP8_GEMMS / 2) * exact[WEIGHT, "GEMMs"]
    assert {key: of_others[key] for key in fp8 if key[0] == FORWARD} == {
        key: took for key, took in fp8.items() if key[0] == FORWARD
    }
    options = ["--world-size", "64", "--hardware", "a100", "--train.precision", "fp8"]
    assert cli.main(["plan", "time", "configs/llama-3-8b.toml", *options]) == 2
    assert "A100 SXM4 80 GB (DGX A100) has no FP8" in capsys.readouterr().err


def test_fp8_weights_are_gathered_in_half_the_time():
    """Next to nothing, so that all of the gathers is seen; embeddings are gathered in BF16."""
    optimizer, found = OptimizerConfig(overlap=False), {}
    for precision, shard in (("dtype", True), ("fp8", True), ("fp8", False)):
        made = recipe(batch=64, micro=8, optimizer=replace(optimizer, shard=shard))
        changed = replace(made, train=replace(made.train, precision=precision))
        found[precision, shard] = step_time(changed, 8, H100).parts
    exact, fp8, replicated = found.values()
    assert 0.5 < fp8[ONCE, "parameters"] / exact[ONCE, "parameters"] < 0.8
    assert fp8[ONCE, "gradients"] == pytest.approx(exact[ONCE, "gradients"], rel=0.01)
    assert fp8[ONCE, "quantisers"] > replicated[ONCE, "quantisers"]
    assert replicated.get((ONCE, "parameters"), 0.0) == 0.0


def test_late_ranks_cost_more_in_larger_groups():
    def waits(tp):
        made = recipe(tp=tp)
        late = step_time(made, tp, V100, UNFUSED).seconds
        return late - step_time(made, tp, V100, replace(UNFUSED, late=0.0)).seconds

    assert waits(1) == 0.0
    assert waits(8) > 1.2 * waits(4) > 1.2 * 1.2 * waits(2) > 0.0


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bytes_of_kernels_are_those_that_ops_count(name):
    """The plan's traffic of a layer is that of the ops of one more layer."""
    import torch

    from benchmarks.predict import Steps, without_data
    from fastmp.nn.gpt import GPT

    gpt2 = GPTConfig(num_layers=8, hidden_size=1024, num_heads=8, vocab_size=1024, max_seq_len=512)
    model = replace({"llama": LLAMA, "gpt2": gpt2}[name], vocab_size=1024)

    def count(layers):
        found = Counter()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with without_data():
                built = GPT(replace(model, num_layers=layers))
                for param in built.parameters():
                    param.main_grad = torch.empty(param.shape, dtype=torch.float32)
                tokens = torch.zeros(2, 512, dtype=torch.int64)
                with Steps() as forward:
                    loss = built.loss(tokens, tokens).sum()
                with Steps() as backward:
                    loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        for step in forward.found + backward.found:  # GEMMs and attention aside
            if not any(part in step.name for part in ("mm", "matmul", "attention", "weight_grad")):
                found["bytes"] += step.bytes
                found["launches"] += step.launches
        return found

    two, one = count(2), count(1)
    shapes = shapes_of(recipe(model, batch=2, micro=2), 1)
    seconds = sum(_other_kernels(shapes, H100, FASTMP)) - LAUNCH * sum(FASTMP.launches)
    planned = seconds * FASTMP.memory * H100.memory_bandwidth
    assert planned == pytest.approx(two["bytes"] - one["bytes"], rel=0.1 if name == "llama" else 0.15)
    assert sum(FASTMP.launches) == pytest.approx(two["launches"] - one["launches"], abs=5)


def test_the_command(capsys):
    arguments = ["plan", "time", "configs/llama-3-8b.toml", "--world-size", "64", "--hardware", "h100"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "an estimate; nothing of it was measured" in text and "fits into 80.0 GiB" in text
    assert "estimated at 0.87 to 1.40 times their speed" in text
    assert cli.main([*arguments[:-1], "rtx4090"]) == 0
    assert "error     unknown: compared with no published run" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    every = [took for own in facts["parts"].values() for took in own.values()]
    assert sum(every) == pytest.approx(facts["seconds"])
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments[:-1], "h1000"])
    assert stopped.value.code == 2 and "h1000" in capsys.readouterr().err
