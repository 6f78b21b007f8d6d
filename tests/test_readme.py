"""README and docs: every page has its place, links name what is there, and what is shown is what happens."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from marks import full

from fastmp import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def in_nav(nav: object) -> list[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [file for part in (nav.values() if isinstance(nav, dict) else nav) for file in in_nav(part)]


NAV = in_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def anchors(page: Path) -> set[str]:
    """What `page.md#...` may name: headings in lower case, without punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation():
    assert len(NAV) == len(set(NAV))
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name in NAV, f"docs/{name} is not in mkdocs.yml: add it under nav, where a reader looks for it"


def test_every_package_that_exports_has_a_page_of_the_api():
    for init in (ROOT / "fastmp").rglob("__init__.py"):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        if "__all__" in init.read_text():
            assert f"api/{package}.md" in NAV, f"{package} exports names: add api/{package}.md to mkdocs.yml"


def test_every_page_of_the_api_is_of_something():
    for name in NAV:
        if name.startswith("api/"):
            module = ROOT.joinpath(*name.removeprefix("api/").removesuffix(".md").split("."))
            assert module.is_dir() or module.with_suffix(".py").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_is_there(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, part = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), f"{page.name}: {link} is not there"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} is not of this project"
        if part:
            assert part in anchors(target), f"{page.name}: {link}: {target.name} has no such heading"


@pytest.mark.parametrize(
    ("page", "number", "launcher"),
    [
        ("README.md", 1, TORCHRUN),
        *full(
            [
                ("README.md", 0, ALONE),
                ("README.md", 1, ALONE),
                ("README.md", 2, ALONE),
                ("docs/pipeline.md", 0, ALONE),
                ("docs/pipeline.md", 0, TORCHRUN),
                ("docs/pipeline.md", 1, ALONE),
                ("docs/cuda-graphs.md", 0, ALONE),
                ("docs/learning-rates.md", 0, ALONE),
                ("docs/optimizer.md", 0, ALONE),
                ("docs/muon.md", 0, ALONE),
                ("docs/from-liger.md", 0, ALONE),
                ("docs/attention.md", 0, ALONE),
                ("docs/many-machines.md", 0, ALONE),
                ("docs/fsdp2.md", 0, TORCHRUN),
                ("docs/reinforcement-learning.md", 0, ALONE),
                ("docs/generate.md", 0, ALONE),
                ("docs/faults.md", 0, TORCHRUN),
                ("docs/transformers.md", 1, TORCHRUN),
            ]
        ),
    ],
)
def test_the_examples_run(page, number, launcher, tmp_path):
    example = tmp_path / "example.py"
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]
    if "transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    example.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(example)], check=True, env=environment, cwd=example.parent, timeout=120)


def test_the_plan_is_what_is_printed(capsys):
    blocks = re.findall(r"```\n\$ fastmp (plan .*)\n((?:.*\n)*?)```", README)
    assert blocks
    for command, expected in blocks:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == expected


def test_the_page_for_users_of_liger_names_functions_that_there_are():
    page = (ROOT / "docs" / "from-liger.md").read_text()
    rows = re.findall(r"^\| `[Ll]iger\w+[^|]*\|([^|]*)\|", page, re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`([\w.]+)[(`]", cell)} - {"x"}
    assert len(rows) > 9 and len(named) > 12
    for name in named:
        room, _, function = name.rpartition(".")
        assert hasattr(importlib.import_module(room or "fastmp.ops"), function), name


@pytest.mark.parametrize("page", ["README.md", "docs/many-machines.md"])
def test_every_file_it_names_is_there(page):
    paths = re.findall(r"(?:configs|docs|benchmarks|scripts)/[\w./-]+\.\w+", (ROOT / page).read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
