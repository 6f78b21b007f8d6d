"""README and docs: every page has its place, links name what is there, and what is shown is what happens."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import BLOCKS, NAV, PAGES, PROGRAMS, ROOT, Block

# what commands of the pages mean in a scratch directory
COMMANDS = {
    "fastmp": "{python} -m fastmp",
    "make": "{make} -f {root}/Makefile SETUP=: VENV=python",
    "python": "{python}",
    "pytest": "{python} -m pytest",
    "tiny-model": "{python} {root}/tests/support/tiny_model.py",
    "torchrun": "{python} -m torch.distributed.run",
    "torchx": "{python} -m torchx.cli.main",
}
# of the small recipes, where a block trains: layouts fit or do not as before
SMALL = {"hidden_size": 48, "expert_ffn_hidden_size": 32, "steps": 6, "eval_batches": 2}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: `<a id>`, and headings in lower case, without punctuation."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings, named = re.findall(r"^#+ (.*)", text, re.MULTILINE), re.findall(r'<a id="([\w-]+)">', text)
    return set(named) | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation():
    assert len(NAV) == len(set(NAV))
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name in NAV, f"docs/{name} is not in mkdocs.yml: add it under nav, where a reader looks for it"


def test_every_package_that_exports_has_a_page_of_the_api():
    for init in (ROOT / "fastmp").rglob("__init__.py"):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        if "__all__" in init.read_text() and package not in ("fastmp.parallel", "fastmp.hf.families"):
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


def test_a_block_of_commands_says_that_it_is_one():
    """Or nobody runs it."""
    for block in BLOCKS:
        if not block.language:
            words = block.text.split()
            assert words[0] not in PROGRAMS, f"{block}: write ```sh above it, and see tests/support/pages.py"


def test_a_block_that_is_not_run_says_why():
    for block in BLOCKS:
        if "not run" in block.notes:
            assert len(block.notes["not run"]) > 10, block
            for path in re.findall(r"tests/[\w/]+\.py", block.notes["not run"]):
                assert (ROOT / path).exists(), block


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """A directory with what a checkout has beside its source, and the commands of this environment."""
    for name in ("benchmarks", "configs", "docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    museum = Path("tests", "testing", "museum")
    shutil.copytree(ROOT / museum, tmp_path / museum)
    shutil.copy(ROOT / "README.md", tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in COMMANDS.items():
        script = command.format(python=sys.executable, root=ROOT, make=shutil.which("make"))
        (programs / name).write_text(f'#!/bin/sh\nexec {script} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or they spin where others use the cores
    return tmp_path


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run commands as a shell does that stops at the first one which fails."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def use_recipes(directory: Path, small: bool) -> None:
    """Put recipes into `directory`; `small`: those that are named so with narrow layers and a few steps."""
    for recipe in (ROOT / "configs").glob("*.toml"):
        text = recipe.read_text()
        if small and "small" in recipe.name:
            for field, value in SMALL.items():
                text = re.sub(rf"^{field} = \d+", f"{field} = {value}", text, flags=re.MULTILINE)
        (directory / recipe.name).write_text(text)


def missing(block: Block) -> bool:
    return "needs" in block.notes and importlib.util.find_spec(block.notes["needs"]) is None


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.runs and b.kind in ("sh", "console")}))
def test_commands_run_and_plans_are_what_is_shown(page, scratch):
    """From top to bottom in one directory, each block behind what its notes want to be there."""
    absent = []
    for block in (block for block in BLOCKS if block.page == page and block.runs):
        if block.kind == "python" and "after" not in block.notes:
            continue
        if missing(block):
            absent.append(block)
            continue
        script = block.command if block.kind == "console" else block.text
        script = re.sub(r"(?<=steps )\d{3,}\b", str(SMALL["steps"]), script)
        before = block.notes.get("before", "")
        use_recipes(scratch / "configs", small=bool(re.search(r"\b(train|generate)\b", before + script)))
        ready = run(before, scratch)
        assert ready.returncode == 0, f"{block}, before: {ready.stdout}{ready.stderr}"
        if block.kind == "python":
            (scratch / "example.py").write_text(script)
            script = "python example.py"
        done = run(script + (" 2>&1" if block.kind == "console" else ""), scratch)
        assert done.returncode == int(block.notes.get("status", 0)), f"{block}: {done.stdout}{done.stderr}"
        if script.startswith(("fastmp plan", "fastmp verify")) and block.kind == "console":
            assert done.stdout == block.shown, block
    if absent:
        reasons = [f"{block} needs {block.notes['needs']}" for block in absent]
        pytest.skip(f"all but these have run: {', '.join(reasons)}")


PYTHON = [
    pytest.param(
        block,
        int(ranks),
        marks=()
        if (block.page, block.notes.get("ranks"), ranks) == ("README.md", "1 2", "2")
        else pytest.mark.full,
        id=f"{block}-{ranks}",
    )
    for block in BLOCKS
    if block.runs and block.kind == "python" and "after" not in block.notes
    for ranks in block.notes.get("ranks", "1").split()
]


@pytest.mark.parametrize(("block", "ranks"), PYTHON)
def test_programs_run(block, ranks, tmp_path):
    example = tmp_path / "example.py"
    if "transformers" in block.text:
        pytest.importorskip("transformers", reason="transformers is not installed")
    example.write_text(block.text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else ()), str(example)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=120)


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


def test_nobody_is_told_to_install_another_projects_package():
    """The name on Python's index belongs to another project: this one is installed from its source."""
    folders = ("fastmp", "examples", "benchmarks", "tests", "tools", "scripts", "docs")
    texts = [*ROOT.glob("*.md"), *(path for name in folders for path in (ROOT / name).rglob("*.*"))]
    wrong = re.compile(r"pip\d* install [^\n`]*?(?<![\w./\-:])fastmp\b(?!\.\w)")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path.suffix in (".md", ".py", ".sh", ".yaml", ".yml")
        for match in wrong.finditer(path.read_text())
    ]
    assert not found
