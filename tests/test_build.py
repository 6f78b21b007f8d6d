"""Installed files: the wheel with its compiled parts, the pure-Python one, and the choices of setup.py.

Wheels are built from this checkout, whose CMake directory is warm after an editable install, and installed
into bare environments that see torch and the rest through a .pth file. Everything about an installed fastmp
runs outside the checkout, whose fastmp/ would shadow it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from wheels import PIP, ROOT, bare_environment, install, load, make_wheel, record_of, run, succeed


@pytest.fixture(scope="module")
def build():
    return load("setup.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("compiled")
    return install(make_wheel(base), base / "venv")


@pytest.fixture(scope="module")
def installed_pure(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("pure")
    gone = ROOT / "build" / "lib" / "fastmp" / "deleted_since.py"
    gone.parent.mkdir(parents=True, exist_ok=True)
    gone.write_text("")
    wheel = make_wheel(base, FASTMP_CPP="0")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(("deleted_since.py", ".so"))]
    return install(wheel, base / "venv")


def test_wheel_is_what_runs_outside_the_checkout(installed, tmp_path):
    code = "import fastmp; print(fastmp.__file__)"
    path = succeed(installed, "-c", code, cwd=tmp_path).strip()
    assert Path(path).is_relative_to(installed.parent.parent)


def test_wheel_has_the_libraries_this_machine_can_build(installed, build):
    record = record_of(installed)
    assert record == build.make_plan().record()
    (package,) = installed.parent.parent.glob("lib/python*/site-packages/fastmp")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    files = {
        **{"cpp": "_C_cpu.so", "cuda": "_C_cuda.so"},
        **{part: f"{name}{suffix}" for part, name in build.LIBRARIES.items() if name in build.PYTHON_MODULES},
    }
    expected = sorted(name for part, name in files.items() if record[part] == "built")
    assert sorted(path.name for path in package.glob("*.so")) == expected


def test_compiled_libraries_load(installed, tmp_path):
    record = record_of(installed)
    code = "import fastmp.ops, json; print(json.dumps(fastmp.ops.backends()))"
    served = json.loads(succeed(installed, "-c", code, cwd=tmp_path))
    assert served
    if record["cpp"] == "built":
        # those of the activation stash are copies, or call the others on a part of a tensor
        others = {name for name, by in served.items() if by["cpu"][0] != "c++"}
        assert others == {name for name in served if name.startswith("stash_")}
    if record["host"] == "built":
        succeed(installed, "-c", "import fastmp._host", cwd=tmp_path)
    if record["replay"] == "built":
        succeed(installed, "-c", "import torch, fastmp._replay", cwd=tmp_path)


@pytest.mark.full
def test_doctor_of_the_wheel(installed, tmp_path):
    report = succeed(installed.with_name("fastmp"), "doctor", cwd=tmp_path)
    record = record_of(installed)
    for part in ("cpp", "autograd", "cuda", "host", "replay"):
        assert f"{part}: {record[part]}" in report
    for arch in record["archs"]:
        assert arch in report


@pytest.mark.full
def test_wheel_trains_five_steps(installed, tmp_path):
    recipe = ROOT / "configs" / "gpt-small.toml"
    command = (installed.with_name("fastmp"), "train", "--recipe", recipe, "--steps", "5", "--name", "five")
    loop = "--train.eval-batches=1 --train.log-interval=1 --checkpoint.interval=0"
    small = "--model.num-layers=1 --data.seq-len=64 --data.micro-batch-size=4 --train.global-batch-size=4"
    succeed(*command, *loop.split(), *small.split(), cwd=tmp_path)
    lines = (tmp_path / "runs" / "five" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    assert len(losses) == 5
    assert losses[0] == pytest.approx(math.log(257), abs=0.4)
    assert losses[-1] < losses[0] - 0.3


def test_libraries_that_are_no_modules_hold_no_python_symbol(installed, build):
    (package,) = installed.parent.parent.glob("lib/python*/site-packages/fastmp")
    symbol = re.compile(rb"\0_?Py(?:[A-Z]\w*)?_\w+(?=\0)")
    for library in package.glob("*.so"):
        is_module = library.name.startswith(build.PYTHON_MODULES)
        assert bool(symbol.findall(library.read_bytes())) == is_module, library.name


@pytest.mark.full
def test_pure_python_wheel_works_and_says_why(installed_pure, tmp_path):
    assert record_of(installed_pure)["cpp"] == "FASTMP_CPP=0"
    report = succeed(installed_pure.with_name("fastmp"), "doctor", cwd=tmp_path)
    assert "cpp: FASTMP_CPP=0" in report
    assert "reference (FASTMP_CPP=0)" in report
    code = """if True:
        import torch, fastmp.ops
        x = torch.randn(4, 8, requires_grad=True)
        fastmp.ops.cross_entropy(x, torch.arange(4), reduction="sum").backward()
        torch.testing.assert_close(x.grad, x.detach().softmax(-1) - torch.eye(4, 8))
        torch.testing.assert_close(fastmp.ops.bias_gelu(x), torch.nn.functional.gelu(x, approximate="tanh"))
    """
    assert run(installed_pure, "-c", code, cwd=tmp_path).stderr == ""  # FASTMP_CPP=0 asked for it


@pytest.mark.full
def test_a_pure_python_install_that_nobody_asked_for_says_so_once(installed_pure, tmp_path):
    (package,) = installed_pure.parent.parent.glob("lib/python*/site-packages/fastmp")
    shutil.copytree(package, tmp_path / "fastmp")
    (tmp_path / "fastmp" / "_build.json").write_text(json.dumps({"cpp": "no C++ compiler (CXX, c++, g++)"}))
    code = "import fastmp.ops, importlib; from fastmp.ops import *; import fastmp.nn"
    warned = run(installed_pure, "-c", code, cwd=tmp_path).stderr
    assert warned.count("fastmp has no C++ kernels here (no C++ compiler (CXX, c++, g++))") == 1
    assert "FASTMP_CPP=0" in warned


@pytest.mark.parametrize("part", ["FASTMP_CPP", "FASTMP_CUDA"])
def test_required_part_without_a_compiler_fails(part, tmp_path):
    variables = {"PATH": str(tmp_path), "CXX": "", "CUDACXX": "", part: "1"}
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path)
    done = run(sys.executable, *PIP, "wheel", *options, ".", cwd=ROOT, **variables)
    assert done.returncode != 0
    assert f"fastmp: error: {part}=1, but no C++ compiler" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_plan_without_a_compiler_is_pure_python(build, monkeypatch, tmp_path):
    for name in ("FASTMP_CPP", "FASTMP_CUDA", "CXX", "CUDACXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = build.make_plan()
    assert plan.libraries() == []
    assert "no C++ compiler" in plan.parts["cpp"]


@pytest.mark.parametrize(
    ("line", "without"),
    [("cuda: Optional[str] = None", True), ("cuda = None", True), ("cuda = '13.0'", False)],
)
def test_cuda_is_compiled_for_a_torch_with_cuda_or_on_demand(build, monkeypatch, tmp_path, line, without):
    """On a machine with a compiler of CUDA."""
    monkeypatch.delenv("FASTMP_CPP", raising=False)
    (tmp_path / "include" / "torch" / "headeronly").mkdir(parents=True)
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n")
    monkeypatch.setenv("FASTMP_TORCH_DIR", str(tmp_path))
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho compute_90\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nvcc"))
    for asked, expected in (("auto", not without), ("1", True), ("0", False)):
        monkeypatch.setenv("FASTMP_CUDA", asked)
        assert ("_C_cuda" in build.make_plan().libraries()) == expected
    monkeypatch.setenv("FASTMP_CUDA", "auto")
    if without:
        assert "torch 2.13.0 is built without CUDA" in build.make_plan().parts["cuda"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0;9.0;10.0+PTX", ["8.0", "9.0", "10.0+PTX"]),
        ("80;90;100+PTX", ["8.0", "9.0", "10.0+PTX"]),
        ("10.0 9.0, 8.0", ["8.0", "9.0", "10.0"]),
        ("90a", ["9.0a"]),
        ("9.0a;100f;12.1", ["9.0a", "10.0f", "12.1"]),
    ],
)
def test_arch_list(build, text, expected):
    assert [str(arch) for arch in build.parse_archs(text)] == expected


@pytest.mark.parametrize("text", ["Hopper", "9", "9.0b", "9.0;x", ";", "sm_90"])
def test_arch_list_names_what_it_does_not_understand(build, text):
    with pytest.raises(ValueError, match=re.escape(repr(text.split(";")[-1] or text))):
        build.parse_archs(text)


def test_gencode_keeps_arch_specific_code_to_its_files(build):
    flags = build.gencode_flags(build.parse_archs("8.0;9.0a;9.0;10.0+PTX"))
    assert flags[""] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    assert flags["SM90A"] == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert flags["SM100F"] == ["-gencode=arch=compute_100f,code=sm_100f"]
    assert build.gencode_flags(build.parse_archs("8.0"))["SM90A"] == []


def test_default_archs_follow_the_compiler(build, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'compute_75\\ncompute_80\\ncompute_90\\n'\n")
    nvcc.chmod(0o755)
    assert build.default_archs(str(nvcc)) == "8.0;9.0+PTX"


def test_torch_is_found_or_the_reason_given(build, monkeypatch, tmp_path):
    import torch

    monkeypatch.delenv("FASTMP_TORCH_DIR", raising=False)
    directory, version, reason = build.find_torch()
    assert (directory, version, reason) == (Path(torch.__file__).resolve().parent, torch.__version__, "")
    monkeypatch.setenv("FASTMP_TORCH_DIR", str(tmp_path))
    assert str(tmp_path) in build.find_torch()[2]
    (tmp_path / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    assert "2.9.1+cpu" in build.find_torch()[2]


def test_the_changelog_and_the_citation_are_of_this_version():
    import fastmp

    versions = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in versions if name != "Unreleased") == fastmp.__version__
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and cited[1] == fastmp.__version__


def test_setting_names_a_wrong_value(build, monkeypatch):
    monkeypatch.setenv("FASTMP_CPP", "yes")
    with pytest.raises(SystemExit, match="FASTMP_CPP must be auto, 0 or 1, got 'yes'"):
        build.setting("FASTMP_CPP")


def test_environment_resolves_extras():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = load(".ci/environment.py").requirements(project, ["dev"])
    assert {"ruff", "pytest-timeout", "tokenizers", "safetensors", "ninja"} <= set(wanted)
    assert not [item for item in wanted if item.startswith(("torch", "fastmp"))]


def test_environment_with_the_newest_torch_pins_neither_triton_nor_numpy():
    environment = load(".ci/environment.py")
    wanted = ["numpy", "numpy<2.4", "triton==3.6.0; platform_system == 'Linux'", "greenlet>=3"]
    assert environment.unpinned(wanted) == ["numpy", "triton; platform_system == 'Linux'", "greenlet>=3"]


def test_environment_says_how_far_a_build_is(capsys):
    environment = load(".ci/environment.py")
    code = "for i in range(3): print(f'[{i + 1}/3] Building')\nprint('done')"
    succeeded, printed = environment.run(sys.executable, "-c", code, watch="compiled")
    assert succeeded and printed.endswith("done\n")
    assert capsys.readouterr().out == "environment: compiled: 3 of 3\n"
    assert environment.run(sys.executable, "-c", "raise SystemExit('no')") == (False, "no\n")
    assert capsys.readouterr().out == ""  # the caller shows it


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source distribution, made of a copy of what git has."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    listed = succeed("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    succeed(sys.executable, "-c", code, cwd=tree)
    (archive,) = out.iterdir()
    return archive


@pytest.mark.exhaustive
def test_the_source_distribution_has_what_builds_explains_and_tests_it(sdist):
    import fastmp

    name = f"fastmp-{fastmp.__version__}"
    assert sdist.name == f"{name}.tar.gz"
    with tarfile.open(sdist) as archive:
        held = {path.removeprefix(f"{name}/") for path in archive.getnames()}
        about = archive.extractfile(f"{name}/PKG-INFO").read().decode()
    built = {path for path in held if path.endswith((".so", ".pyc")) or path.endswith("_build.json")}
    assert not built
    tracked = succeed("git", "ls-files", cwd=ROOT).split()
    folders = r"csrc|fastmp|configs|docs|(examples|tests|tools)/.*\.py"
    needed = re.compile(rf"({folders})|[^/]*\.(md|py|toml|txt|in)$|LICENSE")
    assert not {path for path in tracked if needed.match(path) and (ROOT / path).exists()} - held
    assert f"Version: {fastmp.__version__}" in about and "License-File: LICENSE" in about
    assert "Description-Content-Type: text/markdown" in about and "# fastmp" in about


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
@pytest.mark.parametrize("of", ["wheel", "sdist"])
def test_it_installs_in_an_empty_environment(of, compiler, sdist, tmp_path):
    """From the archive alone, without a network, then passes its own check of every op."""
    if compiler:
        variables = {"FASTMP_CPP": "auto", "FASTMP_ISA": "native"}
    else:
        (tmp_path / "no compilers").mkdir()
        variables = {"FASTMP_CPP": "auto", "PATH": str(tmp_path / "no compilers"), "CXX": "", "CUDACXX": ""}
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    package = sdist
    if of == "wheel":
        succeed(sys.executable, *PIP, "wheel", *offline, "-w", tmp_path, sdist, cwd=tmp_path, **variables)
        (package,) = tmp_path.glob("fastmp-*.whl")
        assert package.name.endswith("-none-any.whl") != compiler
    python = bare_environment(tmp_path / "venv")
    succeed(python, *PIP, "install", *offline, "--ignore-installed", package, cwd=tmp_path, **variables)

    done = run(python.with_name("fastmp"), "--version", cwd=tmp_path)
    assert done.stdout.strip() in package.name
    record = record_of(python)
    assert record["cpp"] == ("built" if compiler else "no C++ compiler (CXX, c++, g++ or clang++)")
    used = run(python, "-c", "import fastmp.ops; print(fastmp.__file__)", cwd=tmp_path)
    assert Path(used.stdout.strip()).is_relative_to(tmp_path / "venv")
    assert used.stderr.count("fastmp has no C++ kernels here (no C++ compiler") == (not compiler)
    check = succeed(python.with_name("fastmp"), "doctor", "--check", cwd=tmp_path)
    assert "ok (error" in check and f"cpp: {record['cpp']}" in check


@pytest.mark.exhaustive
def test_isolated_install_twice_in_one_tree(tmp_path):
    """The second one must not trip over tools of the first one's build environment, which is gone."""
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns(".venv", ".git", "build", "runs", "*.so", "_build.json", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=skipped)
    python = bare_environment(tmp_path / "venv")
    for _ in range(2):
        options = ("--no-deps", "--ignore-installed")
        succeed(python, *PIP, "install", *options, ".", cwd=tree, FASTMP_CPP="1", FASTMP_CUDA="0")
        assert record_of(python)["cpp"] == "built"


def test_instruction_sets_are_all_or_those_of_this_machine(build, monkeypatch):
    monkeypatch.delenv("FASTMP_ISA", raising=False)
    assert build.instruction_sets() == ["base", "avx2", "avx512"]
    monkeypatch.setenv("FASTMP_ISA", "native")
    native = build.instruction_sets()
    assert native[0] == "base" and len(native) <= 2
    if "avx2" in Path("/proc/cpuinfo").read_text():
        assert native[1] in ("avx2", "avx512")
    monkeypatch.setenv("FASTMP_ISA", "avx3")
    with pytest.raises(SystemExit, match="FASTMP_ISA must be all or native, got 'avx3'"):
        build.instruction_sets()
