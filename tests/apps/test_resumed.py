"""What a resumed run says about a recipe that differs from the one that saved its checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from train_tools import arguments

from fastmp.apps.resumed import changes_since
from fastmp.apps.train import main
from fastmp.config.recipe import load_recipe, parse_arguments
from fastmp.optim.lr_schedule import learning_rate

pytestmark = pytest.mark.usefixtures("one_thread")


def changes(tmp_path, before, now, step=12):
    """The lines for two recipes, each with changes to its tables."""

    def made(tables):
        recipe = load_recipe(None)
        for name, table in {"train": {"steps": 12}, **tables}.items():
            recipe = replace(recipe, **{name: replace(getattr(recipe, name), **table)})
        return recipe

    (tmp_path / "recipe.json").write_text(json.dumps(asdict(made(before))))
    checkpoint = tmp_path / "checkpoints" / f"step-{step:08d}"
    return changes_since(made(now), checkpoint, step)


COSINE = {"schedule": "cosine", "lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2}


@pytest.mark.parametrize(
    ("before", "now", "step", "said"),
    [
        ({}, {}, 12, None),
        ({}, {}, 6, None),
        ({}, {"train": {"steps": 24}}, 12, "train.steps is 24, was 12"),
        ({}, {"optimizer": {**COSINE, "lr": 2e-2}}, 6, "optimizer.lr is 0.02, was 0.01"),
        ({}, {"optimizer": {**COSINE, "schedule": "linear"}}, 4, "schedule is linear, was cosine"),
        ({}, {"optimizer": {**COSINE, "weight_decay": 0.3}}, 6, None),
        ({"optimizer": {**COSINE, "schedule": "wsd", "decay_steps": 2}}, {"train": {"steps": 24}}, 6, "rate"),
    ],
)
def test_a_learning_rate_that_jumps_is_one_line(tmp_path, before, now, step, said):
    options = {"optimizer": COSINE}
    lines = changes(tmp_path, {**options, **before}, {**options, **now}, step)
    assert len(lines) == (said is not None)
    if said:
        assert said in lines[0] and "to keep the rate: --optimizer.schedule constant" in lines[0]


@pytest.mark.parametrize(
    ("before", "now", "step"),
    [
        ({}, {"train": {"steps": 24}}, 12),
        ({}, {"optimizer": {**COSINE, "lr": 2e-2}}, 1),  # in the warm-up
        ({"optimizer": {**COSINE, "warmup_steps": 7}}, {"optimizer": {**COSINE, "warmup_steps": 10}}, 3),
        ({}, {"optimizer": {**COSINE, "warmup_steps": 11}}, 6),
        ({}, {"optimizer": {**COSINE, "min_lr": 9e-3, "warmup_steps": 11}}, 10),
    ],
)
def test_options_that_keep_the_rate_keep_it(tmp_path, before, now, step):
    options = {"optimizer": COSINE, "train": {"steps": 12}}
    before, now = {**options, **before}, {**options, **now}
    (line,) = changes(tmp_path, before, now, step)
    given = [
        f"--{table}.{name.replace('_', '-')}={value}" for table in now for name, value in now[table].items()
    ]
    kept = parse_arguments([*given, *line.partition("to keep the rate: ")[2].split()])
    old = replace(load_recipe(None).optimizer, **before["optimizer"])
    rate = learning_rate(step - 1, old, before["train"]["steps"])
    assert [learning_rate(at, kept.optimizer, kept.train.steps) for at in range(step, step + 3)] == [rate] * 3
    assert changes(tmp_path, before, {**asdict(kept), "optimizer": asdict(kept.optimizer)}, step) == []


@pytest.mark.parametrize("schedule", ["wsd", "constant"])
def test_schedules_without_a_length_have_no_jump(tmp_path, schedule):
    options = {"optimizer": {**COSINE, "schedule": schedule}}
    assert changes(tmp_path, options, {**options, "train": {"steps": 24}}, 6) == []


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            {"train": {"steps": 12, "global_batch_size": 64}},
            "train.global_batch_size is 64, was 32: step 7 begins after 98,304 tokens of the data's order, "
            "and 49,152 were read; to read on in order: --train.global-batch-size 32",
        ),
        (
            {"data": {"seq_len": 128}},
            "data.seq_len is 128, was 256: samples are cut anew, so some text is read again or left out; to "
            "read on in order: --data.seq-len 256",
        ),
        ({"data": {"micro_batch_size": 2}}, None),
        ({"data": {"path": "b"}}, "data.path is b, was None: reading begins at step 7 of its order"),
        (
            {"data": {"text": "stdlib", "seq_len": 128}},
            "data.text is stdlib, was pydoc: reading begins at step 7 of its order",
        ),
        (
            {"data": {"blend": ("0.5 a", "0.5 b")}},
            "data.blend is ['0.5 a', '0.5 b'], was None: reading begins at step 7 of its order",
        ),
    ],
)
def test_data_read_from_another_place_is_one_line(tmp_path, now, said):
    before = {"train": {"steps": 12, "global_batch_size": 32}, "data": {"seq_len": 256}}
    lines = changes(tmp_path, before, {**before, **now}, 6)
    assert lines == ([f"warning: {said}"] if said else [])


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"train": 3, "optimizer": []}', '{"train": {}}'])
def test_a_recipe_that_cannot_be_compared_says_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "recipe.json").write_text(content)
    assert changes_since(load_recipe(None), tmp_path / "checkpoints" / "step-00000001", 1) == []


def test_a_run_that_is_resumed_longer_says_both_rates(tmp_path, tokens, capsys):
    options = {"train__eval_interval": 0, "checkpoint__interval": 2, "train__steps": 4}
    assert main(arguments(tmp_path, tokens, **options)) == 0
    capsys.readouterr()
    assert main([*arguments(tmp_path, tokens, **options), "--steps", "8", "--resume", "auto"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert (
        len(lines) == 1 and "the learning rate is 7.75e-04 in step 5, it was 5.50e-04 in step 4" in lines[0]
    )
    assert "train.steps is 8, was 4" in lines[0]
    assert main([*arguments(tmp_path, tokens, **options), "--steps", "8", "--resume", "auto"]) == 0
    assert "warning" not in capsys.readouterr().out
