"""`fastmp plan`: the JSON and the text of it, and one line for each mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fastmp.apps import cli, plan
from fastmp.config.recipe import load_recipe
from fastmp.config.sizes import num_parameters
from fastmp.distributed.grid import RankGrid

CONFIGS = Path(__file__).parents[2] / "configs"
LAYOUT = ["--world-size", "16", "--tp", "4", "--pp", "2"]
DENSE = ["tp", "cp", "dp", "pp", "mp", "embedding"]
EXPERT = ["etp", "ep", "edp", "pp"]
SCHEDULE = ["schedule", "--pp", "4", "--vpp", "2", "--num-microbatches", "8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan.main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_json_has_every_group_of_both_grids(capsys):
    table = json.loads(run(capsys, "groups", *LAYOUT, "--ep", "4", "--etp", "1", "--json"))
    grid = RankGrid(world_size=16, tp=4, pp=2, ep=4, etp=1)
    assert table == {
        "dense": {name: grid.ranks(name) for name in DENSE},
        "expert": {name: grid.ranks(name) for name in EXPERT},
    }
    assert list(table["dense"]) == DENSE and list(table["expert"]) == EXPERT
    assert table["expert"]["edp"][0] == [0, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world_size", "16", "--tp", "4", "--pp", "2"],
        ["--world_size=16", "--tp=4", "--pp=2"],
        [*LAYOUT, "--dp", "2", "--order", "tp-cp-ep-dp-pp"],
    ],
)
def test_spellings_of_the_same_layout(capsys, arguments):
    assert run(capsys, "groups", *arguments, "--json") == run(capsys, "groups", *LAYOUT, "--json")


def test_the_order_is_obeyed(capsys):
    table = json.loads(run(capsys, "groups", *LAYOUT, "--order", "dp-tp-cp-ep-pp", "--json"))
    assert table["dense"]["dp"][0] == [0, 1]


def test_people_read_the_groups(capsys):
    text = run(capsys, "groups", *LAYOUT)
    assert "16 ranks = tp 4 x cp 1 x dp 2 x pp 2 (dense)" in text
    assert "[0-3] [4-7] [8-11] [12-15]" in text
    assert "[0,4] [1,5] [2,6] [3,7] [8,12] [9,13] [10,14] [11,15]" in text
    assert "[0-3,8-11] [4-7,12-15]" in text
    assert "every rank alone" in text


def test_a_large_world_stays_readable(capsys):
    text = run(capsys, "groups", "--world-size", "65536", "--tp", "8", "--pp", "16")
    assert max(map(len, text.splitlines())) < 160
    assert "8192 x 8" in text and "[65528-65535]" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["groups", "--world-size", "16", "--tp", "3"],
            "world_size 16 is not a multiple of tp 3 x cp 1 x pp 1 = 3",
        ),
        (["groups", "--world-size", "16", "--order", "tp-xp"], "unknown axis 'xp'"),
        (["groups", "--tp", "2"], "--world-size"),
        (["groups", "--world-size", "many"], "many"),
        (["groups", "--world-size", "16", "--tq", "2"], "there is no option --tq; did you mean --tp?"),
        (["groups", "--world-siez", "16"], "there is no option --world-siez; did you mean --world-size?"),
        (
            ["schedule", "--pp", "4", "--vpp", "2", "--num-microbatches", "10"],
            "schedule: num_microbatches 10 leaves a last",
        ),
        ([*SCHEDULE, "--group-size", "3"], "schedule: group_size 3 is less than pp 4"),
        (
            ["schedule", "--pp", "0", "--num-microbatches", "8"],
            "schedule: pp must be a positive integer, got 0",
        ),
        ([*SCHEDULE, "--p2p", "-1"], "schedule: cost p2p must be 0 or more, got -1.0"),
        ([*SCHEDULE, "--hidden", "0.5"], "schedule: --hidden 0.5 has no effect without --overlap: add it"),
        ([*SCHEDULE, "--schedule", "gpipe"], "gpipe"),
        (["schedule", "--num-microbatches", "8"], "--pp"),
        ([*SCHEDULE, "--plot", "picture.xyz"], "xyz"),
        ([*SCHEDULE, "--plot", "no/such/folder/a.png"], "no/such/folder/a.png"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments, part):
    try:
        status = plan.main(arguments)
    except SystemExit as leaving:
        status = leaving.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.startswith(f"fastmp plan {arguments[0]}: ") and captured.err.count("\n") == 1
    assert part in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a command is missing"),
        (["something"], "there is no command 'something'"),
        (["--world-size", "16"], "a command is missing before --world-size"),
    ],
)
def test_no_plan_or_a_wrong_one_lists_them(capsys, arguments, said):
    assert plan.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"fastmp plan: {said}\n")
    assert plan.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert captured.err.endswith(listed)
    assert {line.split()[0] for line in listed.splitlines()[2:]} == set(plan.COMMANDS)


def test_a_plan_takes_the_options_of_training(capsys, tmp_path):
    file = str(CONFIGS / "mixtral-8x7b.toml")
    options = ["--world-size", "64", "--tp", "2", "--parallel.no-recompute", "--json"]
    facts = json.loads(run(capsys, "recipe", file, *options, "--model.num-layers", "16"))
    assert "tp 2 " in facts["layout"] and not facts["recompute"] and facts["ranks"][0]["layers"] == [16]
    facts = json.loads(run(capsys, "graphs", file, *options, "--scope", "attention"))
    assert facts["captured"] == ["attention"] and "tp 2 " in facts["layout"]
    assert plan.main(["recipe", file, "--world-size", "64", "--model.moe.top-k", "9"]) == 2
    assert "top_k 9 is more than num_experts 8" in capsys.readouterr().err


def test_people_read_what_a_recipe_means(capsys):
    text = run(capsys, "recipe", str(CONFIGS / "mixtral-8x7b.toml"), "--world-size", "64")
    assert text.startswith("mixtral-8x7b: 46.70 B parameters in bfloat16, 12.88 B of them for one token\n")
    assert "= etp 2 x ep 8 x edp 4 x pp 1 (experts)\n" in text
    assert max(map(len, text.splitlines())) < 120
    table = [line.split() for line in text.splitlines() if line.startswith("  ")]
    assert table[1][:3] == ["0", "32", "3.22"]
    assert [row[0] for row in table[2:]] == ["group", "tp", "ep", "etp", "dp-cp", "edp"]


@pytest.mark.parametrize(("page", "number"), [("planning.md", 7), ("muon.md", 1)])
def test_pages_show_what_is_printed(capsys, monkeypatch, page, number):
    monkeypatch.chdir(CONFIGS.parent)
    page = (CONFIGS.parent / "docs" / page).read_text()
    command = r"(?:recipe|optimizer|step|time) configs/(?:.*\\\n)*.*"  # a long one continues on the next line
    shown = re.findall(rf"```\n\$ fastmp plan ({command})\n((?:.*\n)*?)```", page)
    assert len(shown) == number
    for command, expected in shown:
        assert run(capsys, *command.replace("\\\n", "").split()) == expected


def test_ranks_of_a_pipeline_that_hold_the_same_share_a_line(capsys, tmp_path):
    text = (CONFIGS / "llama-3-8b.toml").read_text().replace("[parallel]", "[parallel]\npp = 8\nvpp = 2")
    assert "recompute = true" in text
    file = tmp_path / "recipe.toml"
    file.write_text(text.replace("global_batch_size = 512", "global_batch_size = 32"))
    shown = run(capsys, "recipe", str(file), "--world-size", "64")
    facts = json.loads(run(capsys, "recipe", str(file), "--world-size", "64", "--json"))
    assert facts["bubble"] == pytest.approx(7 / (2 * facts["microbatches"]))
    assert [rank["layers"] for rank in facts["ranks"]] == [[2, 2]] * 8
    assert [rank["peak_in_flight"] for rank in facts["ranks"]] == [23, 21, 19, 17, 15, 13, 11, 9]
    assert f"bubble {facts['bubble']:.3g} of the work" in shown
    assert facts["fullest"] in (0, 7) and set(facts["ranks"][3]["sent"]) == {"tp", "pp", "dp-cp"}


def test_dualpipe_v_is_shown_beside_the_other_schedules(capsys):
    """Of DeepSeek-V3 on 2,048 GPUs, in less than a second; rank 0 has the embedding and the output layer."""
    layers = ["1", *["2"] * 30, "0"]
    options = ["--world-size", "2048", "--vpp", "2", "--parallel.schedule", "dualpipe_v"]
    options += ["--parallel.stage-layers", *layers]
    file, began = str(CONFIGS / "deepseek-v3.toml"), time.process_time()
    shown = run(capsys, "recipe", file, *options)
    assert time.process_time() - began < 1.0
    facts = json.loads(run(capsys, "recipe", file, *options, "--json"))
    assert [rank["layers"] for rank in facts["ranks"]] == [[1, 0], *[[2, 2]] * 15]
    assert {rank["peak_in_flight"] for rank in facts["ranks"]} == {33}
    assert facts["ranks"][0]["loss"] > 0 == facts["ranks"][15]["loss"]
    interleaved, zero_bubble = facts["others"]
    assert (interleaved["schedule"], interleaved["microbatch_group_size"]) == ("1f1b", 20)  # 120 microbatches
    assert zero_bubble["schedule"] == "zero_bubble"
    assert zero_bubble["bubble"] < facts["bubble"] < interleaved["bubble"]
    assert facts["ranks"][facts["fullest"]]["total"] < zero_bubble["total"]
    for name in ("dualpipe_v  ", "1f1b in groups of 20", "zero_bubble in groups of 20"):
        assert f"\n  {name}" in shown
    took = json.loads(run(capsys, "time", file, *options, "--json"))
    assert [other["schedule"].partition(" ")[0] for other in took["others"]] == ["1f1b", "zero_bubble"]
    assert all(0.9 < took["seconds"] / other["seconds"] < 1.1 for other in took["others"])
    assert "schedule  dualpipe_v: " in run(capsys, "time", file, *options)


def test_sizes_of_gpt_oss():
    """As transformers counts them, of both sizes; OpenAI gives 20.9 B and 116.8 B."""
    small = load_recipe(CONFIGS / "gpt-oss-20b.toml").model
    large = replace(
        small,
        num_layers=36,
        full_attention_layers=tuple(range(1, 36, 2)),
        moe=replace(small.moe, num_experts=128),
    )
    assert [num_parameters(each) for each in (small, large)] == [20_914_757_184, 116_829_156_672]


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [  # of the published checkpoints
        ("llama-3-8b", 8_030_261_248, 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("deepseek-v3", 671_026_404_352, 37_552_282_624),
        ("kimi-k2", 1_026_408_209_408, 32_861_477_888),
        ("glm-4.5-air", 106_852_245_504, 13_424_123_904),
    ],
)
def test_sizes_of_known_models(capsys, name, parameters, active):
    size = "2048" if name in ("deepseek-v3", "kimi-k2") else "64"
    facts = json.loads(run(capsys, "recipe", str(CONFIGS / f"{name}.toml"), "--world-size", size, "--json"))
    assert (facts["parameters"], facts["active_parameters"]) == (parameters, active)
    recipe, tokens = load_recipe(CONFIGS / f"{name}.toml"), facts["tokens_per_step"]
    model, keys = recipe.model, (recipe.data.seq_len + 1) / 2
    # 6 FLOPs a token and parameter of a product (norms and the input table are none), 6 a layer, key and
    # hidden unit of the heads' keys and values for attention, of which a causal one sees half.
    layers, hidden = model.num_layers + model.mtp_depth, model.hidden_size
    norms = (2 * layers + 1) * hidden
    norms += layers * sum(width for _, width in model.attention.norms)
    biases = layers * sum(each.outputs for each in model.attention.projections if each.bias)
    products = active - model.vocab_size * hidden - norms - biases
    if model.mtp_depth:  # one more layer of the last kind, a projection of two inputs, the output layer
        longer = replace(model, num_layers=layers, mtp_depth=0)
        products += num_parameters(longer, active=True) - active + 2 * hidden**2 + model.vocab_size * hidden
    widths = model.attention.query_size + model.attention.value_size
    attention = 6 * layers * model.num_heads * widths * keys
    assert facts["model_flops"] == pytest.approx(tokens * (6 * products + attention), rel=1e-12)


def test_the_json_of_a_recipe_adds_up(capsys):
    layer = 4 * 192**2 + 2 * 192 * 768 + 4 * 192 + 768 + 192 + 4 * 192
    file = str(CONFIGS / "gpt-small-stdlib.toml")
    facts = json.loads(run(capsys, "recipe", file, "--world-size=1", "--json"))
    assert facts["parameters"] == facts["active_parameters"] == 4 * layer + (257 + 64 + 2) * 192
    [rank] = facts["ranks"]
    assert rank["other_parameters"] == 4 * layer + (384 + 64 + 2) * 192  # with a padded vocabulary
    assert rank["expert_parameters"] == 0 and facts["microbatches"] == 1 and facts["bubble"] == 0.0
    held = rank["weights"] + rank["gradients"] + rank["optimizer"]
    assert held == 18 * rank["other_parameters"]
    assert rank["total"] == held + rank["activations"] + rank["loss"]
    assert rank["sent"] == {} and rank["flops"] == facts["hardware_flops"] > facts["model_flops"]


@pytest.mark.parametrize(
    ("change", "world_size", "part"),
    [
        ("", 12, "world_size 12 is not a multiple of etp 2 x ep 8 x pp 1 = 16"),
        ("tp = 16", 64, "num_kv_heads 8 is not divisible by tp 16"),
        ("ep = 16", 64, "num_experts 8 is not divisible by ep 16"),
        ("tp = 8", 16384, "global_batch_size 1024 is not divisible by micro_batch_size 1 x 2048 data-"),
        ("tq = 8", 64, "unknown key 'tq' in [parallel]"),
    ],
)
def test_a_recipe_that_does_not_fit_is_one_line_and_status_2(capsys, tmp_path, change, world_size, part):
    lines = (CONFIGS / "mixtral-8x7b.toml").read_text().splitlines()
    name = change.partition(" ")[0]
    lines = [line for line in lines if not change or not line.startswith(f"{name} ")]
    lines.insert(lines.index("[parallel]") + 1, change)
    file = tmp_path / "recipe.toml"
    file.write_text("\n".join(lines))
    assert plan.main(["recipe", str(file), "--world-size", str(world_size)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("fastmp plan recipe: ")
    assert captured.err.count("\n") == 1 and part in captured.err


def test_all_that_does_not_fit_is_said_at_once(capsys, tmp_path):
    text = (CONFIGS / "mixtral-8x7b.toml").read_text()
    for old, new in [
        ("tp = 4", "tp = 3"),
        ("top_k = 2", "top_k = 9"),
        ("lr = 3e-4", "lr = 1"),
        ("steps", "x"),
    ]:
        assert f"\n{old}" in text
        text = text.replace(f"\n{old}", f"\n{new}", 1)
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    assert plan.main(["recipe", str(file), "--world-size", "64"]) == 2
    captured = capsys.readouterr()
    first, *others = captured.err.splitlines()
    assert (captured.out, first) == ("", f"fastmp plan recipe: recipe {file}: 6 problems on 64 ranks:")
    assert [line.partition(";")[0] for line in others] == [
        "  MoEConfig: top_k 9 is more than num_experts 8",
        "  unknown key 'x' in [train]",
        "  world_size 64 is not a multiple of tp 3 x cp 1 x pp 1 = 3",
        "  num_heads 32 is not divisible by tp 3",
        "  num_kv_heads 8 is not divisible by tp 3",
        "  seq_len 4096 is not divisible by tp 3 under sequence parallelism",
    ]


def test_a_wrong_value_hides_nothing_of_the_others(capsys, tmp_path):
    text = (CONFIGS / "llama-3-8b.toml").read_text()
    wrong = 'schedule = "x"\npp = 5\nvpp = 2\nmicrobatch_group_size = 2'
    file = tmp_path / "recipe.toml"
    file.write_text(text.replace("[parallel]", f"[parallel]\n{wrong}").replace("\nsteps = ", "\nsteps = -"))
    assert plan.main(["recipe", str(file), "--world-size", "64"]) == 2
    assert [line.partition(";")[0].strip() for line in capsys.readouterr().err.splitlines()[1:]] == [
        "ParallelConfig: schedule must be one of 1f1b, zero_bubble, dualpipe_v, got 'x'",
        "TrainConfig: steps must be positive, got -100000",
        "world_size 64 is not a multiple of tp 4 x cp 1 x pp 5 = 20",
        "microbatch_group_size 2 is less than pp 5: with vpp 2 the ranks would wait for each other",
        "num_layers 32 is not divisible by pp 5 x vpp 2 = 10 stages",
    ]


def test_the_command_line_reaches_it(capsys):
    assert cli.main(["plan", "groups", *LAYOUT]) == 0
    assert "16 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["groups", *LAYOUT], SCHEDULE], ids=lambda arguments: arguments[0])
def test_planning_imports_neither_torch_nor_matplotlib(arguments):
    code = (
        "import sys; from fastmp.apps.cli import main; main(sys.argv[1:]); "
        "sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "plan", *arguments]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def test_a_plan_takes_the_vocabulary_from_the_data(capsys, tmp_path):
    def parameters(*options):
        file = str(CONFIGS / "gpt-small.toml")
        return json.loads(run(capsys, "recipe", file, "--world-size", "1", "--json", *options))["parameters"]

    (tmp_path / "index.json").write_text('{"content": {"vocab_size": 300}}')
    byte, width = parameters(), load_recipe(CONFIGS / "gpt-small.toml").model.hidden_size
    assert parameters("--model.vocab-size", "257") == byte
    assert parameters("--data.path", str(tmp_path)) == byte + 43 * width
    assert parameters("--data.tokenizer", "bpe") == byte + (4096 - 257) * width
    assert (
        plan.main(["recipe", str(CONFIGS / "gpt-small.toml"), "--world-size", "1", "--data.path", "no"]) == 2
    )
    assert "model.vocab_size is not set, and data.path no has no vocabulary" in capsys.readouterr().err
