"""Release wheels: choice of libraries by torch version, names and tags, and one wheel built and installed."""

from __future__ import annotations

import sys
import sysconfig
import zipfile

import pytest
from wheels import ROOT, install, load, succeed


@pytest.mark.parametrize(
    ("built_for", "running", "name"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", "_replay"),
        ("2.13.0", "2.13.1+cu130", "_replay"),
        ("2.13.0", "2.14.0", ""),
        ("2.14.0a0+git1", "2.14.0a0+git1", "_replay"),
        ("2.14.0a0+git1", "2.14.0", ""),
        ("2.14.0", "2.14.0.dev20260101", ""),
        (["2.9.1", "2.10.0", "2.14.1"], "2.10.0+cu128", "_replay_torch2_10"),
        (["2.10.0", "2.14.1"], "2.14.0", "_replay_torch2_14"),
        (["2.10.0", "2.14.1"], "2.1.0", ""),
        (["2.10.0", "2.14.1"], "2.16.0", ""),
        ("", "2.13.0", ""),
    ],
)
def test_a_library_serves_releases_of_the_minor_version_it_is_compiled_for(built_for, running, name):
    from fastmp.ops.core.built import choose_library

    found, absent = choose_library("_replay", built_for, running)
    assert found == name and bool(absent) == (not name)
    if absent:
        versions = built_for if isinstance(built_for, str) else ", ".join(built_for)
        assert absent == f"_replay is compiled for torch {versions}, this is {running}"


@pytest.fixture(scope="module")
def wheels():
    return load("scripts/build_wheels.py")


def test_release_wheels_are_for_each_version_of_torch_that_is_tested(wheels):
    from fastmp.ops.core.built import choose_library
    from fastmp.ops.core.versions import TESTED

    minors = [tuple(int(part) for part in version.split(".")[:2]) for version in wheels.VERSIONS]
    (major, oldest), (_, newest) = TESTED["torch"]
    assert minors == [(major, minor) for minor in range(oldest, newest + 1)]
    for version in wheels.VERSIONS:
        name, _ = choose_library("_C_autograd", wheels.VERSIONS, version)
        assert wheels.versioned("_C_autograd", version) == name + sysconfig.get_config_var("EXT_SUFFIX")


@pytest.mark.parametrize(
    ("needed", "minor"),
    [
        (["GLIBC_2.2.5", "GLIBCXX_3.4.21", "CXXABI_1.3.9"], 28),
        (["GLIBC_2.34", "GLIBC_2.9", "GLIBCXX_3.4.21"], 34),
        (["GLIBC_2.32", "GLIBCXX_3.4.29", "CXXABI_1.3.13"], 34),
        (["GLIBC_2.32", "CXXABI_1.3.13"], 34),
        (["GLIBC_2.34", "GLIBCXX_3.4.30"], 35),
        (["GLIBC_2.34", "GLIBCXX_3.4.33"], 41),  # newer than the table: as on the machine that builds
    ],
)
def test_a_release_wheel_names_the_oldest_glibc_that_has_its_symbols(wheels, needed, minor):
    assert wheels.glibc_minor(needed, 41) == minor


def test_a_release_wheel_has_its_version_tag_and_checksums(wheels, tmp_path):
    info = tmp_path / "unpacked" / "fastmp-0.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: fastmp\nVersion: 0.2.0\n\n# fastmp\n")
    (info / "WHEEL").write_text("Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n")
    (info / "RECORD").write_text("")
    (tmp_path / "unpacked" / "fastmp").mkdir()
    (tmp_path / "unpacked" / "fastmp" / "__init__.py").write_text("")
    wheel = wheels.pack(tmp_path / "unpacked", "cpu", "manylinux_2_34_x86_64", tmp_path / "out")
    assert wheel.name == "fastmp-0.2.0+cpu-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        read = {name: archive.read(name).decode() for name in archive.namelist()}
    info = "fastmp-0.2.0+cpu.dist-info"
    assert "\nVersion: 0.2.0+cpu\n" in read[f"{info}/METADATA"]
    assert read[f"{info}/WHEEL"].endswith("\nTag: cp311-cp311-manylinux_2_34_x86_64\n")
    rows = read[f"{info}/RECORD"].splitlines()
    assert "fastmp/__init__.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0" in rows
    assert sorted(row.split(",")[0] for row in rows) == sorted(read)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_release_wheel_serves_this_torch_without_a_compiler(tmp_path):
    """Built for this torch and the oldest, which pip downloads unless build/torch has them."""
    import torch

    version = torch.__version__.partition("+")[0]
    versions = dict.fromkeys(("2.10.0", version))
    command = ("scripts/build_wheels.py", "--out", tmp_path, "--torch", *versions)
    succeed(sys.executable, *command, cwd=ROOT)
    (wheel,) = tmp_path.glob("fastmp-*+cpu-*-manylinux_2_*.whl")
    python = install(wheel, tmp_path / "venv")
    (tmp_path / "no compilers").mkdir()
    report = succeed(
        python.with_name("fastmp"), "doctor", "--check", cwd=tmp_path, PATH=str(tmp_path / "no compilers")
    )
    for part in ("autograd", "replay"):
        assert f"{part}: built, serves this torch" in report
    assert f"torch: {' '.join(versions)}" in report
    assert ": c++ (compiled kernel)" in report
