"""`fastmp plan search`: models of transformers, and the published run that stands beside an estimate."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from fastmp.apps import cli
from fastmp.config.recipe import load_recipe
from fastmp.config.sizes import num_parameters
from fastmp.plan.hardware import GPUS
from fastmp.plan.published_runs import NEAR, nearest_run, published_runs, run_distance
from fastmp.plan.search_report import describe_search, search_facts, search_parser, space_of
from fastmp.plan.space import Space

DENSE = load_recipe("configs/gpt2-355m.toml").model
SMALL = ["plan", "search", "gpt-small", "--gpus", "8", "--hardware", "h100"]


def test_a_run_far_away_is_named_without_its_residual(capsys):
    assert cli.main(SMALL) == 0
    text = capsys.readouterr().out
    assert "nearest   no published run is near: MPT 1B BF16, 8 x H100 is " in text
    assert "factors of two away" in text and "published 45,455" not in text
    found = search_facts(Space(load_recipe("configs/llama-3-8b.toml"), 8, GPUS["h100"], {"tp": [1]}), 2**37)
    assert found["nearest"]["factors_of_two"] <= NEAR
    assert any(line.startswith("nearest   Llama 3 8B ") for line in describe_search(found))


def test_the_distance_of_a_published_run_counts_factors_of_two():
    run = next(each for each in published_runs() if each.name == "Llama 3 8B FP8, 8 x H100")
    assert run_distance(run, run.recipe, 8, "h100") == 0.0
    assert run_distance(run, run.recipe, 32, "h100") == 1.0
    assert run_distance(run, run.recipe, 8, "h200") == 2.0
    wide = replace(run.recipe, train=replace(run.recipe.train, precision="dtype"))
    assert run_distance(run, wide, 8, "h100") == 0.5
    moe = next(each for each in published_runs() if each.model == "Qwen3 30B-A3B")
    active, whole = num_parameters(moe.recipe.model, active=True), num_parameters(moe.recipe.model)
    apart = math.log2(num_parameters(run.recipe.model) / active) + math.log2(whole / active)
    far = run_distance(run, replace(moe.recipe, train=run.recipe.train), 8, "h100")
    assert far == pytest.approx(apart)
    assert nearest_run(run.recipe, 8, "h100") is run


def config_json(directory, model_type, name, **more):
    """Write a directory of transformers with config.json alone."""
    from fastmp.hf.config_json import to_transformers

    content = to_transformers(model_type, load_recipe(f"configs/{name}.toml").model, "bfloat16")
    (directory / "config.json").write_text(json.dumps(content | more))
    return str(directory)


def test_a_directory_of_transformers_is_searched_like_its_recipe(tmp_path, capsys):
    directory = config_json(tmp_path, "qwen3_moe", "qwen3-30b-a3b", invented=1)
    options = ["--gpus", "8", "--tp", "1", "--cp", "1", "--pp", "1", "--train.precision", "dtype", "--json"]
    assert cli.main(["plan", "search", directory, *options]) == 2
    assert "config.json: unknown 'invented' in a config" in capsys.readouterr().err
    assert cli.main(["plan", "search", directory, *options, "--ignore", "invented"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert cli.main(["plan", "search", "qwen3-30b-a3b", *options]) == 0
    assert there | {"name": "qwen3-30b-a3b"} == json.loads(capsys.readouterr().out)


def test_a_directory_of_an_encoder_is_searched_with_masked_tokens(tmp_path, capsys):
    directory = config_json(tmp_path, "bert", "bert-336m")
    assert cli.main(["plan", "search", directory, "--gpus", "8", "--tp", "1", "--pp", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens_per_step"] == 4_194_304 and facts["best"][0]["mfu"] > 0.1


def test_a_directory_of_transformers_has_samples_and_steps_of_its_own(tmp_path):
    def space(*options):
        parsed = search_parser("fastmp plan search").parse_args([str(tmp_path), "--gpus", "8", *options])
        return space_of(parsed, replace(DENSE, max_seq_len=32768)).recipe

    default, longer = space(), space("--data.seq-len", "16384", "--model.num-layers", "2")
    assert (default.data.seq_len, default.train.global_batch_size) == (4096, 1024)
    assert (longer.data.seq_len, longer.train.global_batch_size) == (16384, 256)
    assert default.train.name == tmp_path.name and longer.model.num_layers == 2
    parsed = search_parser("fastmp plan search").parse_args([str(tmp_path), "--gpus", "8"])
    assert space_of(parsed, replace(DENSE, max_seq_len=512)).recipe.data.seq_len == 512


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no config.json in this directory: expected a directory of a transformers model, a TOML file"),
        ('{"model_type": "mamba"}', "config.json: model_type 'mamba' is not supported; expected one of gpt2"),
        ("{", "config.json"),
    ],
)
def test_a_directory_that_is_no_model_is_an_error(content, expected, tmp_path, capsys):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.main(["plan", "search", str(tmp_path), "--gpus", "8"]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and str(tmp_path) in shown and len(shown.splitlines()) == 1
