"""Recipes: what a file and the command line may say, and how a mistake in either is named."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from fastmp.config import (
    NORMS,
    BertConfig,
    CheckpointConfig,
    DataConfig,
    GPTConfig,
    GraphConfig,
    LatentConfig,
    MaskedLMConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RopeScaling,
    TrainConfig,
)
from fastmp.config.command_line import did_you_mean
from fastmp.config.option_names import SYNONYMS
from fastmp.config.options import ConfigError
from fastmp.config.recipe import load_as, load_recipe, parse_arguments, read_recipe

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def write(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_recipes_of_the_project_load(path):
    recipe = load_recipe(path)
    assert recipe.train.name == path.stem, "a run is found under the name of its recipe"
    assert recipe.train.global_batch_size % recipe.data.micro_batch_size == 0


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path):
    path = write(tmp_path, "[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n[model]\nnum_kv_heads = 3\n")
    recipe = load_recipe(path)
    assert recipe.optimizer.lr == 1.0 and isinstance(recipe.optimizer.lr, float)
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.model.num_kv_heads == 3
    assert recipe.train == Recipe().train and recipe.data == Recipe().data
    assert load_recipe(write(tmp_path, "")) == Recipe()


MISTAKES = {
    "[optimizer]\nlearning_rate = 1": r"unknown key 'learning_rate' in \[optimizer\]",
    "[optimizer]\nwarmup_step = 1": r"unknown key .* in \[optimizer\]; did you mean 'warmup_steps'\?",
    "[optimiser]\nlr = 1": r"unknown key 'optimiser' table; did you mean 'optimizer'\?",
    "lr = 1": r"unknown key .lr. table; there are model, .*optimizer, train, checkpoint, graphs",
    "model = 3": r"\[model\] must be a table, got 3",
    "[model]\nnum_layers = '4'": r"model\.num_layers must be of type int, got '4'",
    "[model]\nnum_layers = true": r"model\.num_layers must be of type int, got True",
    "[optimizer]\nlr = 'fast'": r"optimizer\.lr must be of type float, got 'fast'",
    "[optimizer]\nbetas = [0.9]": r"optimizer\.betas must be a list of 2 values, got \[0\.9\]",
    "[model]\nnum_heads = 7": r"GPTConfig: hidden_size 192 is not divisible by num_heads 7",
    "[optimizer]\nlr = 1e-5": r"min_lr 0\.0001 and lr 1e-05",
    "[train]\ndtype = 'fp8'": r"dtype must be one of auto, float32, bfloat16, float16, got 'fp8'",
    "[train]\nname = '../x'": r"name must be the name of a directory, got '\.\./x'",
    "[model.moe]\ntopk = 1": r"unknown key 'topk' in \[model\.moe\]; did you mean 'top_k'\?",
    "[model]\nmoe = 8": r"\[model\.moe\] must be a table, got 8",
    "[model.moe]\ntop_k = 1.0": r"model\.moe\.top_k must be of type int, got 1\.0",
    "[model.moe]\ntop_k = 9": r"MoEConfig: top_k 9 is more than num_experts 8",
    "[parallel]\nvpp = 2\nstage_layers = [4]": r"stage_layers must be 2 numbers .*, got \(4,\)",
    "[parallel]\netp = 0": r"ParallelConfig: etp must be positive, got 0",
    "[train\n": "not TOML",
    "[train]\nsteps = 9223372036854775808": r"train\.steps must be a number of 64 bits, got one of 64",
    f"[optimizer]\nlr = {'9' * 400}": r"optimizer\.lr must be a number of 64 bits, got one of 1329",
    f"[train]\nname = 0x{'f' * 5000}": r"train\.name must be of type str, got a number of 20000 bits",
    f"[train]\nsteps = {'9' * 5000}": "not TOML",
    "[model]\nnum_layers = 70000": r"GPTConfig: num_layers must be at most 65536, got 70000",
    "[optimizer]\nlr = nan": r"optimizer\.lr must be a finite number, got nan",
    "[optimizer]\nclip_grad_norm = inf": r"optimizer\.clip_grad_norm must be a finite number, got inf",
    "[data]\npath = 'a\u0000b'": "not TOML",
    '[data]\npath = "a\\u0000b"': r"data\.path must be at most 4096 characters, none of them a control",
    f"[train]\nname = '{'x' * 5000}'": r"train\.name must be at most 4096 characters, .*, got 'x+\.\.\.x+'",
    f"[train]\nsteps = {'[' * 5000}": "nested too deeply",
    f"[train]\nsteps{'.a' * 150} = 1": r"train\.steps must be of type int, got {'a': {'a': .*\.\.\.",
    f"[train]\nsteps{'.a' * 20_000} = 1": "nested too deeply",  # gigabytes, if it were read
    "#" * 65_537: "cannot be read .larger than any file of its kind: 65537 bytes, at most 65536",
    "[train]\nsteps = 1\nsteps = 2": "not TOML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=rf"recipe .*recipe\.toml: .*{MISTAKES[text]}"):
        load_recipe(path)


def test_all_mistakes_in_a_file_are_named_at_once(tmp_path):
    text = """
        rate = 1
        [model]
        num_heads = 7
        norm = "batch"
        dropout = 1.0
        hiden_size = 768
        [model.moe]
        top_k = "2"
        num_experts = 0
        score = "relu"
        z_loss = -1.0
        [parallel]
        tp = 0
        vpp = 2.0
        [optimizer]
        lr = -1.0
        betas = [0.9]
    """
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as raised:
        load_recipe(path)
    assert str(raised.value).splitlines() == [
        f"recipe {path}: 12 problems:",
        "  unknown key 'rate' table; there are model, parallel, data, optimizer, train, checkpoint, graphs",
        "  unknown key 'hiden_size' in [model]; did you mean 'hidden_size'?",  # so 192 % 7 says nothing
        "  model.moe.top_k must be of type int, got '2'",
        "  MoEConfig: score must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'",
        "  MoEConfig: z_loss must not be negative, got -1.0",
        "  MoEConfig: num_experts must be positive, got 0",
        f"  GPTConfig: norm must be one of {', '.join(NORMS)}, got 'batch'",
        "  GPTConfig: dropout must be in [0, 1), got 1.0",
        "  parallel.vpp must be of type int, got 2.0",
        "  ParallelConfig: tp must be positive, got 0",
        "  optimizer.betas must be a list of 2 values, got [0.9]",
        "  OptimizerConfig: need 0 <= min_lr <= lr and lr > 0, got min_lr 0.0001 and lr -1.0; set both",
    ]
    read = read_recipe(path)
    assert {"model.hidden_size", "model.norm", "parallel.tp", "optimizer.lr"} <= read.unused
    assert not [name for name in read.unused if name.startswith(("data.", "train."))]


def test_a_second_mistake_is_named_although_its_message_has_the_word_of_a_field(tmp_path):
    """ "steps" and "text" are fields of tables, and words of messages about others."""
    for text, second in (
        ('[train]\nsteps = "5"\nprofile_steps = [13, 10]', "TrainConfig: profile_steps 13:10 must be"),
        ('[data]\ntext = 3\nblend = ["1 a"]\n[data.masked_lm]', "DataConfig: blend and masked_lm exclude"),
    ):
        with pytest.raises(ValueError, match=r"2 problems:\n  \w+\.\w+ must be of type") as raised:
            load_recipe(write(tmp_path, text))
        assert second in str(raised.value)


@dataclass(frozen=True)
class Table:
    number: int = 1

    def __post_init__(self):
        if self.number < 0:
            raise ValueError("number must not be negative")


@dataclass(frozen=True)
class Whole:
    table: Table = Table()
    steps: int = 1


def test_a_table_of_others_may_raise_any_value_error(tmp_path):
    path = write(tmp_path, "steps = 1.5\n[table]\nnumber = -1")
    with pytest.raises(ValueError, match=r"2 problems:\n  steps must .*\n  number must not be negative"):
        load_as(Whole, path)


CHECKED = (
    *(BertConfig, CheckpointConfig, DataConfig, GPTConfig, GraphConfig, LatentConfig, MaskedLMConfig),
    *(MoEConfig, OptimizerConfig, ParallelConfig, RopeScaling, TrainConfig),
)


@pytest.mark.parametrize("cls", CHECKED, ids=lambda cls: cls.__name__)
def test_a_problem_names_its_fields(cls):
    """Each field alone with wrong values of its type: what is found names that field, and fields only."""
    names, found = {each.name for each in fields(cls)}, set()
    for each in fields(cls):
        for wrong in (-1, 0, 10**9, -1.5, 1e9, "no such name", (), (-1, -1), True):
            try:
                cls(**{each.name: wrong})
            except ConfigError as error:
                for about, message in error.problems:
                    assert about and about <= names, message
                    assert each.name in about, message
                    found |= about
            except (TypeError, AttributeError, ValueError):
                continue  # not of its type
    assert found or not list(fields(cls))


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 7\n")
    assert load_recipe(path).train.steps == 7


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"recipe .*nothing\.toml: cannot be read \(No such file"):
        load_recipe(tmp_path / "nothing.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.toml: not TOML"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "not a regular file"),  # which would be waited for
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),  # which never ends
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_refused_at_once(tmp_path, make, said):
    make(tmp_path / "recipe.toml")
    with pytest.raises(ValueError, match=rf"recipe\.toml: cannot be read \({said}"):
        load_recipe(tmp_path / "recipe.toml")


def test_the_command_line_goes_over_the_file(tmp_path):
    path = write(tmp_path, "[optimizer]\nlr = 0.5\neps = 1e-6\n[train]\nsteps = 50\n")
    for recipe_option in (["--recipe", str(path)], [f"--recipe={path}"]):
        recipe = parse_arguments(
            [
                *recipe_option,
                "--optimizer.lr",
                "1e-2",
                "--tp=2",
                "--steps",
                "60",
                "--name",
                "mine",
                "--resume",
                "auto",
            ]
        )
        assert recipe.optimizer.lr == 1e-2 and recipe.optimizer.eps == 1e-6
        assert recipe.parallel.tp == 2
        assert (recipe.train.steps, recipe.train.name, recipe.checkpoint.resume) == (60, "mine", "auto")
    path = write(tmp_path, '[graphs]\nscope = ["full"]\n')  # which waits for --graphs
    assert not parse_arguments(["--recipe", str(path)]).graphs.enabled
    assert parse_arguments(["--recipe", str(path), "--graphs"]).graphs.scope == ("full",)
    assert parse_arguments(["--graphs", "--scope", "full_step"]).graphs.scope == ("full_step",)
    assert parse_arguments([]) == Recipe()
    assert parse_arguments(["--parallel.sequence-parallel"]).parallel.sequence_parallel
    assert parse_arguments(["--optimizer.betas", "0.1", "0.2"]).optimizer.betas == (0.1, 0.2)


def test_experts_are_a_table_of_their_own(tmp_path):
    path = write(tmp_path, "[model.moe]\nnum_experts = 4\ncapacity_factor = 2\n[parallel]\nep = 2\netp = 1\n")
    recipe = load_recipe(path)
    assert recipe.model.moe == MoEConfig(num_experts=4, capacity_factor=2.0)
    assert (recipe.parallel.ep, recipe.parallel.etp) == (2, 1)
    options = [
        "--recipe",
        str(path),
        "--ep",
        "4",
        "--etp",
        "2",
        "--model.moe.top-k",
        "1",
        "--model.moe.expert-bias",
    ]
    recipe = parse_arguments(options)
    assert recipe.model.moe == MoEConfig(num_experts=4, top_k=1, capacity_factor=2.0, expert_bias=True)
    assert (recipe.parallel.ep, recipe.parallel.etp) == (4, 2)
    assert parse_arguments(["--model.moe.top-k", "3"]).model.moe == MoEConfig(top_k=3)
    assert parse_arguments(["--model.num-layers", "3"]).model.moe is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--optimizer.learning-rate 1", "there is no option --optimizer.learning-rate"),
        (
            "--optimizer.warmup-step 1",
            "option --optimizer.warmup-step; did you mean --optimizer.warmup-steps?",
        ),
        ("--stps 3", "there is no option --stps; did you mean --steps?"),
        ("--top-k 3", "there is no option --top-k; did you mean --model.moe.top-k?"),
        ("--seed 3", "there is no option --seed; did you mean --train.seed or --data.seed?"),
        ("--optimizer.lr fast", "--optimizer.lr: invalid float value: 'fast'"),
        ("--model.norm batch", "--model.norm: invalid choice: 'batch' (choose from 'layernorm', 'rmsnorm')"),
        ("--tp 0", "tp must be positive, got 0"),
        ("--tp 0 --model.num-heads 7", "2 problems:\n  ParallelConfig: tp must be positive, got 0\n  GPTCon"),
        ("gpt-small", "gpt-small"),
        ("--recipe", "--recipe: expected one argument"),
        ("--recipe nothing.toml", "recipe nothing.toml: cannot be read"),
        (
            "--scope full --graphs.verify-every 2",
            "--graphs.scope, --graphs.verify-every would do nothing w",
        ),
        ("--graphs.evaluation", "--graphs.evaluation would do nothing without --graphs"),
        ("--parallel.tp-overlap-rows 9", "tp-overlap-rows would do nothing without --parallel.tp-overlap"),
        (f"--steps {'9' * 5000}", "--train.steps/--steps: expected a whole number of steps, got '999"),
        ("--steps 3:5", "number of steps, got '3:5'; to profile these steps: --profile-steps 3:5"),
        ("--profile-steps 3:x", "--profile-steps: expected FIRST:LAST as in 10:13, got '3:x'"),
        ("--train-iters 3", "there is no option --train-iters; did you mean --steps?"),
        ("--optimizer.shard false", "--optimizer.shard takes no value: write --optimizer.no-shard instead"),
        ("--graphs=true", "--graphs takes no value: leave 'true' out"),
        ("a.toml b.toml", "expected one recipe, got a.toml and b.toml"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_status_2(capsys, arguments, said):
    with pytest.raises(SystemExit) as leaving:
        parse_arguments(arguments.split())
    assert leaving.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.startswith("fastmp train: ") and captured.out == ""


def test_help_says_what_every_field_is_with_its_choices_and_default(capsys):
    with pytest.raises(SystemExit) as leaving:
        parse_arguments(["--help-all"])
    assert leaving.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    tables = {
        "model": GPTConfig,
        "model.moe": MoEConfig,
        "model.bert": BertConfig,
        "model.rope_scaling": RopeScaling,
        "model.latent": LatentConfig,
        "parallel": ParallelConfig,
        "data": DataConfig,
        "data.masked_lm": MaskedLMConfig,
    }
    tables |= {"optimizer": OptimizerConfig, "train": TrainConfig, "graphs": GraphConfig}
    for table, cls in tables.items():
        for field in fields(cls):
            if f"{table}.{field.name}" in tables:
                continue
            assert f" --{table}.{field.name} ".replace("_", "-") in shown.replace(",", " ")
            assert field.metadata["help"] in shown
            for choice in field.metadata["choices"]:
                assert choice in shown
    assert "norm of every layer: layernorm (mean and variance), rmsnorm (root mean square" in shown
    assert "--parallel.tp, --tp N tensor parallelism" in shown


def test_an_option_goes_over_a_mistake_in_the_file(tmp_path):
    path = write(tmp_path, "[train]\nsteps = -1\n[model.moe]\ntop_k = 3\ncapacity_factor = 1.0\n")
    recipe = load_recipe(path, {"train": {"steps": 5}, "model": {"moe": {"capacity_factor": None}}})
    assert recipe.train.steps == 5 and recipe.model.moe == MoEConfig(top_k=3)
    options = "--steps 5 --model.moe.capacity-factor none --model.no-linear-bias --graphs.scope none".split()
    recipe = parse_arguments(["--recipe", str(path), *options])
    assert recipe.model.moe == MoEConfig(top_k=3) and not recipe.model.linear_bias
    assert recipe.graphs.scope is None and recipe.train.steps == 5
    assert parse_arguments(["--graphs", "--scope", "attn", "mlp"]).graphs.scope == ("attn", "mlp")


def test_the_page_for_users_of_megatron_names_fields_that_there_are(capsys):
    page = (Path(__file__).parents[2] / "docs" / "from-megatron.md").read_text()
    named = set(re.findall(r"`((?:model|parallel|data|optimizer|train|checkpoint)\.[a-z_.]+)`", page))
    with pytest.raises(SystemExit):
        parse_arguments(["--help-all"])
    options = set(re.findall(r"--[a-z][a-z.-]+", capsys.readouterr().out))
    assert len(named) > 60
    assert {"--" + name.replace("_", "-") for name in named} <= options
    names = set(re.findall(r"`(fastmp\.[\w.]+)`", page))
    assert len(names) > 25
    for name in names:
        assert hasattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]), name


def test_megatron_options_are_answered_as_on_the_page(capsys):
    page = (Path(__file__).parents[2] / "docs" / "from-megatron.md").read_text()
    page = page.partition("## Options")[2].partition("## Modules")[0]
    with pytest.raises(SystemExit):
        parse_arguments(["--help-all"])
    options = set(re.findall(r"--[a-z][a-z.-]+", capsys.readouterr().out))
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `--")]
    assert len(rows) > 60
    fields: dict[str, set[str]] = {}
    for theirs, ours in rows:
        for option in re.findall(r"--[a-z0-9-]+", theirs):
            fields.setdefault(option, set()).update(re.findall(r"`(?:\w+\.)+(\w+)", ours))
    for option, names in fields.items():
        said = SYNONYMS.get(option, "") or did_you_mean(option, options)
        assert not names or any(name.replace("_", "-") in said for name in names), (option, said)
    for said in SYNONYMS.values():
        assert set(re.findall(r"--[a-z][a-z.-]+", said)) <= options, said


def test_all_unknown_options_are_answered_at_once(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--tensor-model-parallel-size", "2", "--moe-grouped-gemm", "--fp4-format=e2m1"])
    assert capsys.readouterr().err == (
        "fastmp train: there are no such options:\n"
        "  --tensor-model-parallel-size; did you mean --tp?\n"
        "  --moe-grouped-gemm: leave it out, fused kernels are always used\n"
        "  --fp4-format: not supported\n"
    )
