"""The studies: predictions within their tolerance, and committed pages that are what the commands write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fastmp.config.sizes import num_parameters
from fastmp.plan.kernels import LAUNCHES
from fastmp.plan.layout import problems
from fastmp.plan.published_runs import MODELS, nearest_run, published_runs
from fastmp.schedule.simulate import Costs
from fastmp.schedule.stream_schedule import interleave
from tools.study import __main__ as study
from tools.study import (
    fp8,
    graphs,
    launches,
    overlap,
    published,
    recent,
    recipes,
    schedules,
)

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
MAX_BYTES = 150_000


def test_runs_of_2021_have_the_parameters_and_the_total_that_were_published():
    runs = published.a100_runs()
    for run in runs:
        assert f"{num_parameters(run.recipe.model, published.PADDED) / 1e9:.1f} B" == run.name
    assert runs[-1].tflops * runs[-1].gpus == pytest.approx(502e3, rel=4e-3)


def test_models_of_published_runs_have_the_parameters_that_were_published():
    counts = {
        "MPT 1B": 1315950592, "MPT 3B": 2651837440, "MPT 7B": 6658859008, "MPT 13B": 12853954560,
        "MPT 30B": 29975214080, "MPT 70B": 64862437376,
    }  # fmt: skip
    for name, count in counts.items():
        assert num_parameters(MODELS[name]) == pytest.approx(count, rel=1e-3)
    billions = {"Llama 3 405B": 405.9, "Qwen3 30B-A3B": 30.5, "Qwen3 235B-A22B": 235.1, "DeepSeek-V3": 671.0}
    for name, count in billions.items():
        assert num_parameters(MODELS[name]) / 1e9 == pytest.approx(count, rel=2e-3)


def test_published_runs_fit_their_gpus_and_are_ranked_as_published():
    runs = published_runs()
    assert len(runs) >= 30 and {run.hardware for run in runs} == {"h100", "h200", "b200", "gb200"}
    for run in runs:
        assert not problems(run.recipe, run.gpus), run.name
        assert run.source.address.startswith("github.com/")
        assert run.source.version and run.source.date
    assert recent.rank_correlation(runs, flops=False) > 0.95
    assert recent.rank_correlation(runs, flops=True) > 0.85
    for run in runs:
        assert nearest_run(run.recipe, run.gpus, run.hardware).model == run.model


def test_launches_of_segments_are_those_that_are_counted():
    for kind in ("dense", "moe"):
        for name, counted in launches.count_launches(kind).items():
            assert LAUNCHES[name] == counted


@pytest.mark.full
def test_the_page_of_graphs_is_what_the_command_writes():
    """With the host times that were measured for it; launches are counted anew."""
    measured = json.loads((STUDIES / "graphs.json").read_text())
    assert graphs.page(graphs.count(), measured) == (STUDIES / "graphs.md").read_text()


@pytest.mark.full
def test_graphs_remove_launches_and_host_time():
    counts = graphs.count()
    assert counts["moe"]["attention"] == counts["dense"]["attention"]
    assert all(forward > 0 for own in counts.values() for forward, _ in own.values())
    assert sum(map(sum, counts["dense"].values())) == 29  # by hand: 11 ops and 18
    assert counts["moe"]["router"][0] == 13  # without what only asks for a dtype
    eager, whole = launches.host_seconds("dense", [(), ("attn", "mlp")])
    assert whole < eager / 2


@pytest.mark.full
def test_the_page_of_schedules_is_what_the_command_writes():
    assert schedules.page() == (STUDIES / "schedules.md").read_text()


@pytest.mark.full
def test_the_page_of_overlap_is_what_the_command_writes():
    assert overlap.page() == (STUDIES / "overlap.md").read_text()


def test_training_hides_as_much_as_an_order_planned_for_its_times():
    for exchange in overlap.SHARES:
        own = overlap.sections(exchange)
        both = overlap.chains(own)
        assert overlap.took(overlap._order(own), *both) <= 1.05 * overlap.took(interleave(*both), *both)


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (1, 2, 1), (2, 3, 1), (1, 1, 3)])
def test_formulas_of_schedules_are_what_is_simulated(forward, inputs, weights):
    """For every size of the study up to 8 ranks."""
    for cell in schedules.cells(Costs(forward, inputs, weights)):
        if cell.schedule.pp <= 8 and cell.schedule.num_microbatches <= 32:
            run = cell.run
            assert max(run.peak_activations) == cell.peak
            assert cell.bubble is None or run.bubble == pytest.approx(cell.bubble), cell.schedule


def test_pictures_of_pages_are_there_and_small():
    for page in STUDIES.glob("*.md"):
        for name in [part.split(")")[0] for part in page.read_text().split("](")[1:]]:
            if not name.startswith(("..", "http")):
                assert 0 < (STUDIES / name).stat().st_size < MAX_BYTES, name


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in study.COMMANDS if name != "recipes"])
def test_the_command_writes_page_and_pictures(name, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    if (STUDIES / f"{name}.json").exists():  # with the measurements that are there
        shutil.copy(STUDIES / f"{name}.json", tmp_path)
    assert study.main([name, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / name}.md\n"
    committed = {path.name for path in STUDIES.glob(f"{name}*") if path.suffix in (".md", ".png", ".json")}
    assert {path.name for path in tmp_path.iterdir()} == committed


@pytest.mark.full
def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert study.main(["overlap", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert capsys.readouterr().err.startswith("python -m tools.study overlap: ")


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"cpu": "", "host_us": {"moe": 1}}'])
def test_a_file_that_is_no_measurement_is_one_line(text, tmp_path, capsys):
    (tmp_path / "graphs.json").write_text(text)
    assert study.main(["graphs", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is no file of measurements" in said and said.count("\n") == 1


def test_small_models_learn_in_fp8_as_in_their_dtype():
    """As committed: mean differences within a hundredth of a nat, less than seeds differ."""
    found = json.loads((STUDIES / "fp8.json").read_text())
    assert found["steps"] == 500 and set(found["runs"]) == set(fp8.RECIPES)
    for recipe, runs in found["runs"].items():
        assert set(runs) == set(fp8.PRECISIONS)
        for precision in ("e4m3", "e5m2"):
            each = fp8.differences(found, recipe, precision)
            assert len(each) == len(fp8.SEEDS) and any(each)
            assert abs(sum(each) / len(each)) < fp8.GOAL < fp8.spread(found, recipe)


@pytest.mark.exhaustive
def test_the_command_trains_as_it_says(monkeypatch):
    monkeypatch.setattr(fp8, "RECIPES", ("gpt-small",))
    monkeypatch.setattr(fp8, "SEEDS", (1,))
    monkeypatch.setattr(fp8, "PRECISIONS", {name: fp8.PRECISIONS[name] for name in ("dtype", "e4m3")})
    found = fp8.measure(20)
    losses = [runs["1"] for runs in found["runs"]["gpt-small"].values()]
    assert [len(own) for own in losses] == [2, 2] and losses[0] != losses[1]
    assert all(own[0] > own[1] > 2 for own in losses)


def test_the_table_of_recipes_is_that_of_the_command():
    assert recipes.page() == (recipes.CONFIGS / "README.md").read_text()
    names = {path.stem for path in recipes.CONFIGS.glob("*.toml")}
    assert {line.partition("](")[0][3:] for line in recipes.page().splitlines() if "](" in line} >= names


def test_the_command_writes_the_table_of_recipes(tmp_path, capsys):
    assert study.main(["recipes", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'README.md'}\n"
    assert (tmp_path / "README.md").read_text() == recipes.page()


def test_measured_rates_are_those_of_result_files(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps(
            {
                "environment": {"device": "NVIDIA H100", "commit": "abc"},
                "recipes": [
                    {"recipe": "gpt-small", "tokens_per_second": 1234.4},
                    {"recipe": "moe-small", "raised": "status 1"},
                ],
            }
        )
    )
    steps = [{"tokens_per_second": rate} for rate in (1, 500, 700, 600)]
    runs = [
        {"command": f"fastmp train --recipe configs/mla-small.toml --steps 60{options}", "steps": steps}
        for options in ("", " --graphs")
    ]
    content = {"runs": [{**run, "device": "NVIDIA H200", "commit": "def"} for run in runs]}
    (tmp_path / "b.json").write_text(json.dumps(content))
    assert recipes.measured_rates(tmp_path) == {
        "gpt-small": "1,234 tokens/s, NVIDIA H100, abc",
        "mla-small": "600 tokens/s, NVIDIA H200, def",
    }
