"""Scaling of Megatron-LM: predictions within their tolerance, and the committed page of the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.megatron_paper.__main__ import main
from examples.megatron_paper.scaling import measured, paper, study
from fastmp.config.sizes import num_parameters
from fastmp.plan.published_runs import published_runs, residual
from fastmp.testing.ranks import run_ranks
from tools.study import __main__ as studies
from tools.study.published import PADDED

STUDIES = Path(__file__).parents[3] / "docs" / "studies"


@pytest.fixture(scope="module")
def rows():
    return [*study.paper_rows()]


def test_the_paper_is_predicted_within_a_tenth(rows):
    predicted = [row for row in rows if not row.calibrated]
    assert [row.published for row in predicted] == [
        0.77, 0.74, 0.76, 15.1, 0.82, 0.80, 0.77, 2.34, 2.98,
    ]  # fmt: skip
    for row in predicted:
        assert abs(row.residual) <= study.TOLERANCE, row
    for row in rows:
        if row.calibrated:
            assert abs(row.residual) <= 0.01, row
    assert sum(row.calibrated for row in rows) == 2


def test_more_heads_and_more_ranks_cost_what_they_did(rows):
    """The order of the published rows is that of the predicted ones."""
    heads = [row.predicted for row in rows if "Table 7" in row.what]
    faster = [row.predicted for row in rows if "Table 8" in row.what]
    assert heads == sorted(heads, reverse=True) and faster == sorted(faster)
    assert 0.03 < heads[0] - heads[-1] < 0.07  # published: 5 points


def test_shapes_are_those_of_table_1():
    counts = [num_parameters(shape.recipe().model, 51200) for shape in paper.TABLE_1]
    assert [round(count / 1e9, 4) for count in counts] == [1.2135, 2.4904, 4.1991, 8.3170]


def test_flops_and_efficiencies_are_counted_as_published_in_2020():
    counts, milliseconds = [], paper.CASE_MS
    for (shape, (tflops, *_)), ms in zip(paper.CASES, milliseconds, strict=True):
        counts.append(num_parameters(shape.recipe().model, PADDED))
        flops = paper.counted_flops(shape.recipe()) / shape.tp / ms * 1e3
        assert flops == pytest.approx(tflops * 1e12, rel=1.5e-3)
    assert [f"{count / 1e9:.2f}" for count in counts] == ["1.16", "2.03", "4.24", "8.67"]
    scaling = [counts[i] / counts[0] / 2**i * milliseconds[0] / milliseconds[i] for i in range(4)]
    assert scaling == pytest.approx([1.0, 0.896, 0.825, 0.743], abs=1e-3)


def test_every_gpu_says_how_far_published_runs_are_from_their_estimates():
    found: dict[str, list[float]] = {}
    for row in study.other_rows():
        if "TFLOP/s" in row.what:
            found.setdefault(row.what.partition(" ")[0].lower(), []).append(row.predicted / row.published)
    for run in published_runs():
        if not run.note:
            found.setdefault(run.hardware, []).append(residual(run))
    for name, gpu in study.GPUS.items():
        own = found.get(name)
        assert gpu.compared == (None if own is None else (round(min(own), 2), round(max(own), 2)))


def test_the_scaling_page_is_what_the_command_writes(rows):
    measured = json.loads((STUDIES / "scaling.json").read_text())
    page = study.page(rows, study.hardware_rows(), measured)
    assert page == (STUDIES / "scaling.md").read_text()


@pytest.mark.full
def test_measured_steps_count_their_collectives():
    recipe = measured.scaled(paper.TABLE_1[1], 1)
    steps = run_ranks(measured._time_steps, 2, recipe, timeout=120)
    for seconds, communication, collectives in (step for own in steps for step in own):
        assert 0.0 < communication < seconds
        # 4 all-reduces of each layer, those of embedding and head, an all-gather of statistics
        assert collectives == 4 * recipe.model.num_layers + 3


@pytest.mark.full
def test_the_command_writes_page_and_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    shutil.copy(STUDIES / "scaling.json", tmp_path)
    assert main(["scaling", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'scaling.md'}\n"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in STUDIES.glob("scaling*")}


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"cpu": ""}'])
def test_a_file_that_is_no_measurement_is_one_line(text, tmp_path, capsys):
    (tmp_path / "scaling.json").write_text(text)
    assert main(["scaling", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is no file of measurements" in said and said.count("\n") == 1
    assert said.startswith("python -m examples.megatron_paper scaling: ")


def test_the_command_that_studies_had_names_this_one(capsys):
    assert studies.main(["scaling", "--out", "x"]) == 2
    meant = "did you mean: python -m examples.megatron_paper scaling --out x\n"
    assert capsys.readouterr().err.endswith(meant)
