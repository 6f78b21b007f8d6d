"""The museum: `fastmp verify` finds every public bug that is rebuilt there and accepts its repaired form."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
from marks import full

from fastmp.testing.differential.verification import verify

MUSEUM = Path(__file__).parent / "museum"
EXHIBITS = sorted(path.stem for path in MUSEUM.glob("*.py") if path.stem != "parts")
PAGE = Path(__file__).parents[2] / "docs" / "museum.md"
QUICK = ("label_smoothing", "expert_scale")


def exhibit(name: str):
    sys.path.insert(0, str(MUSEUM))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("name", [*QUICK, *full(name for name in EXHIBITS if name not in QUICK)])
def test_bug_is_found_and_named(name: str) -> None:
    module = exhibit(name)
    for bug, expected in module.EXPECTED.items():
        found = verify(getattr(module, bug)(), cases=8).smallest
        assert found is not None, f"{name}: {bug} was not found"
        assert (found.kind, found.cause.name) == expected, f"{name}: {bug}: {found.cause}"


@pytest.mark.parametrize("name", [*QUICK, *full(name for name in EXHIBITS if name not in QUICK)])
def test_repaired_code_gives_no_alarm(name: str) -> None:
    found = verify(exhibit(name).Fixed(), cases=16, seed=1, shrinks=False).smallest
    assert found is None, f"{name}: {found}"


@pytest.mark.parametrize("name", EXHIBITS)
def test_exhibit_is_short_and_cites_its_report(name: str) -> None:
    text = (MUSEUM / f"{name}.py").read_text()
    cited = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"#\d+", cited) and re.search(r"\d{4}-\d{2}-\d{2}", cited)
    code = text.split('"""', 2)[2]
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 40, f"{len(lines)} lines of code"


def test_the_page_shows_every_bug_and_its_cause() -> None:
    page = PAGE.read_text()
    bugs = [(name, *expected) for name in EXHIBITS for expected in exhibit(name).EXPECTED.values()]
    assert not [name for name in EXHIBITS if f"`{name}.py`" not in page]
    assert page.count("](#") == len(bugs)
    for name, _, cause in bugs:
        assert f"| {cause} |" in page, name


def test_museum_has_14_bugs_at_least() -> None:
    assert sum(len(exhibit(name).EXPECTED) for name in EXHIBITS) >= 14
