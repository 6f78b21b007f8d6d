"""Imports go one way: what each module imports, read with `ast`, must follow docs/architecture.md.

Tests are imported by their file names, which must differ.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fastmp"

# What each part may import from the others. A part not listed may not import fastmp at all.
ALLOWED = {
    "fastmp": {"_lazy"},
    "fastmp._lazy": set(),
    "fastmp.__main__": {"cli"},
    "fastmp.commands": set(),
    "fastmp.host": {"_host"},
    "fastmp.config": {
        *("durations", "model_config", "options"),
        *("parallel.launchers", "parallel.schedule", "parallel.shards"),
    },
    "fastmp.durations": set(),
    "fastmp.startup": {"config"},
    "fastmp.model_config": {"options"},
    "fastmp.options": set(),
    "fastmp.files": set(),
    "fastmp.profiling": {"pulse"},
    "fastmp.pulse": set(),
    "fastmp.parallel.exchange": set(),
    "fastmp.parallel.grid": set(),
    "fastmp.parallel.launchers": set(),
    "fastmp.parallel.heartbeats": {"parallel.records"},
    "fastmp.parallel.messages": {"parallel.schedule", "parallel.simulate"},
    "fastmp.parallel.overlap": {"parallel.schedule"},
    "fastmp.parallel.schedule": set(),
    "fastmp.parallel.shards": set(),
    "fastmp.parallel.simulate": {"parallel.schedule"},
    "fastmp.parallel.records": set(),
    "fastmp.parallel.verdict": {"parallel.records"},
    "fastmp.sizes": {"config"},
    "fastmp.layout": {"config", "files", "parallel.exchange", "parallel.grid", "parallel.schedule"},
    "fastmp.plan": {
        "plan",
        "commands",
        "graphs.buffers",
        "graphs.scope",
        "layout",
        "parallel.exchange",
        "parallel.grid",
        "parallel.overlap",
        "parallel.schedule",
        "parallel.shards",
        "parallel.simulate",
        "config",
        "sizes",
        "train.recipe",
    },
    "fastmp.ops": {"ops", "config", "host", "profiling"},
    "fastmp.parallel": {"parallel", "ops", "config", "profiling", "pulse", "_lazy"},
    "fastmp.graphs": {
        *(
            "config",
            "graphs",
            "parallel.schedule",
            "nn.segment",
            "ops.wgrad",
            "profiling",
            "pulse",
            "_lazy",
            "_replay",
        ),
    },
    "fastmp.graphs.buffers": {"parallel.schedule"},
    "fastmp.graphs.overlapped": {
        "graphs",
        "nn.overlap",
        "nn.segment",
        "parallel.overlap",
        "parallel.schedule",
    },
    "fastmp.graphs.scope": set(),
    "fastmp.integrations": {
        *(
            "integrations",
            "commands",
            "config",
            "files",
            "graphs",
            "model_config",
            "nn",
            "ops",
            "parallel",
            "profiling",
        ),
        *("sizes", "train", "_lazy"),
    },
    "fastmp.nn": {"nn", "parallel", "ops", "config", "sizes", "profiling", "_lazy"},
    "fastmp.train": {
        *(
            "train",
            "commands",
            "graphs",
            "nn",
            "parallel",
            "ops",
            "config",
            "files",
            "layout",
            "model_config",
            "plan.recipe",
            "profiling",
            "pulse",
            "host",
            "_lazy",
        ),
    },
    "fastmp.train.main": {
        "integrations",
        "train",
        "nn",
        "parallel",
        "config",
        "durations",
        "layout",
        "profiling",
        "_host",
    },
    "fastmp.generation": {
        *("generation", "commands", "config", "files", "graphs", "integrations", "layout", "nn", "parallel"),
        *("train", "_lazy"),
    },
    "fastmp.evaluation": {
        *(
            "evaluation",
            "commands",
            "config",
            "files",
            "graphs",
            "layout",
            "nn",
            "parallel",
            "train",
            "_lazy",
        ),
        *("generation.command", "generation.load", "generation.on_ranks"),
    },
    **{
        f"fastmp.evaluation.{name}": {"files"}
        for name in ("journal", "lambada", "report", "wikitext", "windows")
    },
    "fastmp.testing": {"testing", "parallel", "ops", "_lazy"},
    "fastmp.testing.buffers": {"graphs.buffers"},
    "fastmp.testing.layouts": {"testing", "nn", "parallel", "config"},
    "fastmp.testing.models": {"nn", "parallel", "config"},
    "fastmp.launch": {"config", "parallel.runtime"},
    "fastmp.prove": {"prove", "config", "graphs", "nn", "ops", "parallel", "plan.hardware", "testing"},
    "fastmp.prove.claims": set(),
    "fastmp.prove.command": {"prove.claims", "prove.page", "prove.run", "commands", "config"},
    "fastmp.prove.page": {"prove.claims"},
    "fastmp.prove.run": {"prove.claims", "prove.page"},
    "fastmp.doctor": {"commands", "config", "ops", "testing"},
    "fastmp.hang": {"commands", "files", "parallel.records", "parallel.verdict"},
    "fastmp.study": {
        "study",
        "graphs.scope",
        "commands",
        "config",
        "parallel.overlap",
        "parallel.schedule",
        "parallel.simulate",
        "plan",
        "sizes",
    },
    "fastmp.study.launches": {"config", "graphs", "nn", "parallel", "testing"},
    "fastmp.study.measured": {"study", "config", "layout", "nn", "parallel", "sizes", "testing", "train"},
    "fastmp.finetune": {
        *("finetune", "commands", "config", "files", "generation", "layout", "nn", "options"),
        *("parallel", "sizes", "train"),
    },
    "fastmp.cli": {
        *(
            "commands",
            "doctor",
            "evaluation",
            "finetune",
            "generation",
            "hang",
            "plan",
            "prove",
            "study",
            "train",
        ),
        "startup",
    },
}
STDLIB_ONLY = (
    *(
        "fastmp",
        "fastmp._lazy",
        "fastmp.cli",
        "fastmp.commands",
        "fastmp.config",
        "fastmp.durations",
        "fastmp.files",
        "fastmp.layout",
        "fastmp.model_config",
        "fastmp.options",
        "fastmp.pulse",
        "fastmp.sizes",
        "fastmp.startup",
    ),
    *("fastmp.graphs", "fastmp.graphs.buffers", "fastmp.graphs.scope"),
    *(
        "fastmp.study",
        *(f"fastmp.study.{name}" for name in ("overlap", "page", "published", "scaling", "schedules")),
    ),
    *("fastmp.prove", *(f"fastmp.prove.{name}" for name in ("claims", "command", "page", "run"))),
    *(
        f"fastmp.parallel.{name}"
        for name in (
            *("exchange", "grid", "launchers", "messages", "overlap", "schedule", "shards", "simulate"),
            *("heartbeats", "records", "verdict"),
        )
    ),
    "fastmp.train.checkpoint.boxes",
    *(f"fastmp.finetune.{name}" for name in ("formats", "metrics", "results", "selection", "tasks")),
    *(f"fastmp.evaluation.{name}" for name in ("journal", "lambada", "report", "wikitext", "windows")),
    *(
        "fastmp.plan",
        *(
            f"fastmp.plan.{path.stem}"
            for path in (PACKAGE / "plan").glob("[a-z]*.py")
            if "plot" not in path.stem
        ),
    ),
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            from_root = node.module == "fastmp"
            found += [f"fastmp.{alias.name}" for alias in node.names] if from_root else [node.module]
    return found


def part(module: str) -> str:
    """The most specific entry of ALLOWED that `module` belongs to."""
    while module not in ALLOWED:
        assert "." in module, f"{module} has no entry in ALLOWED"
        module = module.rpartition(".")[0]
    return module


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    own = module_name(path)
    allowed = {f"fastmp.{target}" for target in ALLOWED[part(own)]}
    for name in imports(path):
        if name.split(".")[0] != "fastmp" or name == "fastmp":
            continue
        assert any(f"{name}.".startswith(f"{target}.") for target in allowed), f"{own} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_one_module_imports_triton(path):
    """Another one imports its interpreter."""
    own, found = module_name(path), {name for name in imports(path) if name.split(".")[0] == "triton"}
    if own != "fastmp.ops._triton":
        assert found <= ({"triton.runtime.interpreter"} if own == "fastmp.testing.interleave" else set())


@pytest.mark.parametrize("module", STDLIB_ONLY)
def test_pure_modules_use_the_standard_library_only(module):
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for name in imports(path):
        top = name.split(".")[0]
        assert top == "fastmp" or top in sys.stdlib_module_names, f"{module} imports {name}"


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "train --help",
        "generate --help",
        "eval --help",
        "eval wikitext --help",
        "finetune --help",
        "hang --help",
        "prove --help",
        "study --help",
        "plan groups --world-size 8 --tp 2",
        "plan graphs configs/mixtral-8x7b.toml --world-size 64",
        "plan optimizer configs/mixtral-8x7b.toml --world-size 64",
        "plan recipe configs/mixtral-8x7b.toml --world-size 64",
        "plan time configs/mixtral-8x7b.toml --world-size 64",
    ],
)
def test_light_commands_never_import_torch(command):
    program = "import sys, fastmp.cli; sys.exit(fastmp.cli.main(sys.argv[1:]) or 'torch' in sys.modules)"
    arguments = [sys.executable, "-c", program, *command.split()]
    subprocess.run(arguments, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_the_environment_is_read_in_one_place():
    readers = {module_name(p) for p in MODULES if re.search(r"os\.(environ|getenv)", p.read_text())}
    assert readers - {"fastmp.testing.ranks"} == {"fastmp.config"}  # the harness sets its children's


def test_files_of_tests_have_names_of_their_own():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
