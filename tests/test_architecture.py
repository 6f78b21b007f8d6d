"""Imports go down: what each module imports, read with `ast`, follows the floors of docs/architecture.md.

Imports inside functions and under TYPE_CHECKING count as well. Test files are imported by their names, which
must differ.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("examples", "fastmp", "tools")

# From the ground up. A module belongs to the most specific floor that names it or a package around it.
FLOORS = (
    ("fastmp._lazy", "fastmp._host", "fastmp._replay", "fastmp.host", "fastmp.profiling", "fastmp.status"),
    ("fastmp.config",),
    ("fastmp.schedule",),
    ("fastmp.ops.core",),
    ("fastmp.ops",),
    ("fastmp.distributed",),
    ("fastmp.tensor_parallel",),
    ("fastmp.objectives",),
    ("fastmp.optim",),
    ("fastmp.watchdog",),
    ("fastmp.nn",),
    ("fastmp.cuda_graphs",),
    ("fastmp.pipeline",),
    ("fastmp.plan",),
    ("fastmp.training",),
    ("fastmp.hf",),
    ("fastmp.testing",),
    ("fastmp.apps",),
    ("fastmp.__main__", "fastmp.parallel", "tools"),
    ("examples",),
)
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
# Besides everything in config: modules that torch is never imported for.
STDLIB_ONLY = """
    fastmp fastmp._lazy fastmp.status fastmp.config fastmp.plan fastmp.schedule fastmp.optim.flat_layout
    fastmp.distributed.grid fastmp.distributed.exchange_layout fastmp.watchdog.heartbeat
    fastmp.watchdog.records fastmp.watchdog.diagnosis fastmp.cuda_graphs.errors
    fastmp.training.checkpoint.chunks fastmp.apps.cli fastmp.apps.plan fastmp.apps.signals
    fastmp.testing.differential.cases
    fastmp.apps.evaluation.journal fastmp.apps.evaluation.result_tables
    examples.megatron_paper.__main__ examples.megatron_paper.evaluation.lambada
    examples.megatron_paper.evaluation.wikitext examples.megatron_paper.finetuning.formats
    examples.megatron_paper.finetuning.answer_metrics examples.megatron_paper.finetuning.results
    examples.megatron_paper.finetuning.selection examples.megatron_paper.finetuning.finetune_tasks
    tools.prove.claims tools.prove.__main__ tools.prove.page tools.prove.run tools.study.__main__
    tools.study.overlap tools.study.page tools.study.published tools.study.schedules
""".split()
INTERPRETS = "tools.interleave"
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> list[str]:
    """Return the modules and names that `path` imports, each `from x import y` as "x.y"."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


NAMES = {module_name(path): path for path in MODULES}
PURE = sorted(
    name
    for name in NAMES
    if name in STDLIB_ONLY
    or (name.startswith(("fastmp.config.", "fastmp.plan.", "fastmp.schedule.")) and "_plot" not in name)
)


def module_of(name: str) -> str:
    """Return the module that `name`, a module or a name in one, comes from."""
    return name if name in NAMES else name.rpartition(".")[0]


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    """Return what each module imports of this project. Read by a fixture, so that collection stays quick."""
    return {
        name: {module_of(each) for each in imports(path) if each.split(".")[0] in PACKAGES} - {"fastmp"}
        for name, path in NAMES.items()
    }


def floor(module: str) -> int:
    """Return the number of the most specific floor around `module`, 0 at the ground."""
    while module not in FLOOR_OF:
        assert "." in module, f"{module} is on no floor"
        module = module.rpartition(".")[0]
    return FLOOR_OF[module]


def test_imports_go_down(arrows):
    up = [
        f"{name} (floor {floor(name)}) imports {target} (floor {floor(target)})"
        for name in sorted(arrows.keys() - {"fastmp"})
        for target in sorted(arrows[name])
        if floor(target) > floor(name)
    ]
    assert up == []


def test_graphs_import_segments_but_no_layers(arrows):
    """Of `nn` they know the protocol that layers are written in, and that imports no other part of `nn`."""
    protocol = {"fastmp.nn.segment", "fastmp.nn.overlap"}
    inside = {name: targets for name, targets in arrows.items() if name.startswith("fastmp.cuda_graphs")}
    for name, targets in {**inside, **{each: arrows[each] for each in protocol}}.items():
        layers = {each for each in targets if each.startswith("fastmp.nn")} - protocol
        assert not layers, f"{name} imports {sorted(layers)}"
    assert protocol <= set().union(*inside.values())


def test_imports_have_no_cycle(arrows):
    try:
        list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_only_one_module_imports_triton():
    """Another one imports its interpreter."""
    found = {
        name: {each for each in imports(path) if each.split(".")[0] == "triton"}
        for name, path in NAMES.items()
    }
    assert {name for name, names in found.items() if names} == {"fastmp.ops.core._triton", INTERPRETS}
    assert all(
        name.startswith("triton.runtime.interpreter") or name == "triton.runtime"
        for name in found[INTERPRETS]
    )


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_use_the_standard_library_only(module):
    for name in imports(NAMES[module]):
        top = name.split(".")[0]
        if top in PACKAGES:
            assert module_of(name) in PURE or module_of(name).endswith("_plot"), f"{module}: {name}"
        else:
            assert top in sys.stdlib_module_names, f"{module} imports {name}"


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "train --help",
        "generate --help",
        "eval --help",
        "eval heldout --help",
        "hang --help",
        "checkpoint --help",
        "hf import --help",
        "plan groups --world-size 8 --tp 2",
        "plan graphs configs/mixtral-8x7b.toml --world-size 64",
        "plan optimizer configs/mixtral-8x7b.toml --world-size 64",
        "plan recipe configs/mixtral-8x7b.toml --world-size 64",
        "plan step configs/mixtral-8x7b.toml --world-size 64 --graphs.enabled",
        "plan time configs/mixtral-8x7b.toml --world-size 64",
    ],
)
def test_light_commands_never_import_torch(command):
    program = (
        "import sys, fastmp.apps.cli; sys.exit(fastmp.apps.cli.main(sys.argv[1:]) or 'torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", program, *command.split()]
    subprocess.run(arguments, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_the_environment_is_read_in_one_place():
    readers = {module_name(p) for p in MODULES if re.search(r"os\.(environ|getenv)", p.read_text())}
    assert readers - {"fastmp.testing.ranks"} == {"fastmp.config.environment"}


def test_files_of_tests_have_names_of_their_own():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


# Calls that open a file by its path: they wait for a pipe, read a device without end, follow links.
BY_PATH = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "fromfile", "memmap", "loadtxt"),
    *(
        "genfromtxt",
        "safe_open",
        "load_file",
        "json.load",
        "np.load",
        "tomllib.load",
        "pickle.load",
        "torch.load",
    ),
}
OPENERS = {"fastmp.config.file_access", "fastmp.config.console"}  # the latter opens /dev/null
OUTPUTS = {  # whose path the user gives, and may be a pipe
    "fastmp.apps.plan_search": "write_text",
    "fastmp.plan.time": "write_text",
}


def nodes(path: Path, pattern: str) -> Iterator[ast.AST]:
    """Yield the nodes of a module in whose text the pattern is found."""
    text = path.read_text()
    if re.search(pattern, text):
        yield from ast.walk(ast.parse(text))


def opens_by_path(call: ast.Call) -> str:
    """Return the name of a call that opens a file by its path, or ""."""
    words = ast.unparse(call.func).split(".")
    name = next((n for n in (words[-1], ".".join(words[-2:])) if n in BY_PATH), "")
    modes = [each.value for each in call.args[1:] if isinstance(each, ast.Constant)]
    creates = name == "open" and any(str(mode).startswith("x") for mode in modes)
    mapped = name == "memmap" and ast.unparse(call.args[0]) == "file"  # which is open already
    return "" if creates or mapped else name


def test_files_are_opened_in_one_place():
    found = {
        f"{name}:{node.lineno}: {opened}"
        for name, path in NAMES.items()
        if name.startswith(("examples", "fastmp")) and name not in OPENERS
        for node in nodes(path, r"open\(|read_|write_|fromfile|memmap|load")
        if isinstance(node, ast.Call) and (opened := opens_by_path(node)) and OUTPUTS.get(name) != opened
    }
    assert found == set()


def test_errors_of_foreign_content_are_listed_once():
    """A list of its own misses some, such as the OverflowError of `int(1e999)`; see `FOREIGN_ERRORS`."""
    listed = {"ValueError", "TypeError", "LookupError", "KeyError", "AttributeError", "RecursionError"}
    found = [
        f"{name}:{node.lineno}"
        for name, path in NAMES.items()
        if name.startswith(("examples", "fastmp")) and name != "fastmp.config.file_access"
        for node in nodes(path, r"TypeError")
        if isinstance(node, ast.Tuple) and len(listed & {ast.unparse(each) for each in node.elts}) > 2
    ]
    assert found == []


def test_text_for_people_goes_through_one_writer():
    """Another one raises where a disk is full or a stream is closed; see `fastmp.config.console`."""
    found = [
        f"{name}:{node.lineno}"
        for name, path in NAMES.items()
        if name.startswith(("examples", "fastmp")) and name != "fastmp.config.console"
        for node in nodes(path, r"file=|sys\.std|os\.write\(2|print_exc")
        if (
            isinstance(node, ast.Call)
            and (
                (ast.unparse(node.func) == "print" and any(each.arg == "file" for each in node.keywords))
                or ast.unparse(node).startswith(("os.write(2", "traceback.print_exc"))
            )
        )
        or (isinstance(node, ast.Attribute) and re.fullmatch(r"sys\.(std(out|err))\.\w+", ast.unparse(node)))
    ]
    assert found == []
