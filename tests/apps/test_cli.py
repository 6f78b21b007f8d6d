"""The command line: dispatch, the doctor's report, and its pure judgement of what code runs on what GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import fastmp
from fastmp.apps import cli, doctor, first_rank

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cli.COMMANDS)


def become_rank(monkeypatch, rank, world_size):
    """Set what a launcher sets for a rank, which does not wait for rank 0 to print."""
    monkeypatch.setattr(first_rank, "GRACE_SECONDS", 0.0)
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_prints_a_mistake(rank, capsys, monkeypatch):
    become_rank(monkeypatch, rank, 2)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["train", "--optimizer.learning-rate", "1"])
    assert leaving.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and ("there is no option" in printed.err) == (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layout_that_does_not_fit_ends_before_ranks_meet(rank, capsys, monkeypatch):
    become_rank(monkeypatch, rank, 3)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["train", str(ROOT / "configs" / "gpt-small.toml"), "--tp", "2"])
    assert leaving.value.code == 2
    assert ("does not fit 3 ranks" in capsys.readouterr().err) == (rank == 0)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == fastmp.__version__


def test_a_reader_that_leaves_is_no_traceback():
    command = f"{sys.executable} -m fastmp plan groups --world-size 4096 --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == '{"dense": ' and not done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [([], "usage"), (["trian"], "there is no command 'trian'; did you mean: fastmp train")],
)
def test_a_missing_or_unknown_command_is_a_usage_error(arguments, named, capsys):
    assert cli.main(arguments) == 2
    assert named in capsys.readouterr().err


LIGHT = ["", "plan recipe", "plan graphs", *sorted(cli.COMMANDS)]


@pytest.mark.parametrize("command", LIGHT)
def test_help_takes_little_time_and_imports_neither_torch_nor_numpy(command):
    program = (
        "import sys, time, fastmp.apps.cli\n"
        "try: fastmp.apps.cli.main(sys.argv[1:])\n"
        "except SystemExit as leaving: assert not leaving.code\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys() and time.process_time() < 0.7"
    )
    subprocess.run([sys.executable, "-c", program, *command.split(), "--help"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("value", "major", "expected"),
    [
        ("", 9, r"is not set: set it to 1 for tensor parallelism"),
        ("8", 8, r"is 8: set it to 1 for tensor parallelism"),
        ("1", 9, r"is 1: right for tensor parallelism; unset it if .* FSDP2 overlap"),
        ("1", 10, r"is 1: unset it"),
        ("", 10, r"is not set: right for this GPU"),
    ],
)
def test_doctor_says_what_the_number_of_queues_does(value, major, expected):
    assert re.fullmatch(rf"CUDA_DEVICE_MAX_CONNECTIONS {expected}.*", doctor.connections(value, major))


def test_doctor_reads_the_number_of_queues_where_there_is_a_gpu(capsys, monkeypatch):
    import torch

    gpu = SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not any("CONNECTIONS" in line for line in doctor._devices([])) or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert doctor._devices([])[-1] == doctor.connections("1", 9)


def test_doctor_says_who_serves_the_ops(capsys, monkeypatch):
    from fastmp import ops

    table = {f"op{i}": {"cpu": ("c++", "compiled"), "cuda": ("triton", "default")} for i in range(30)}
    table |= {
        name: {"cpu": ("reference", "FASTMP_OPS"), "cuda": ("triton", "default")} for name in ("rope", "norm")
    }
    monkeypatch.setattr(ops, "backends", lambda: table)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    on_cpu = "  all 32 ops: c++ (compiled), except\n    reference (FASTMP_OPS): norm, rope\n"
    assert f"ops on cpu\n{on_cpu}ops on cuda\n  all 32 ops: triton (default)\n" in printed
    assert "Mixtral 8x7B, 8 experts of 2048 rows, 28672 x 4096, bfloat16: cpu grouped, sm_80 loop" in printed


@pytest.mark.parametrize(
    "names", [("bias_gelu", "rope"), pytest.param(None, marks=pytest.mark.full)], ids=["two", "all"]
)
def test_doctor_check_measures_ops_against_float64(capsys, monkeypatch, names):
    import fastmp.testing.ops  # noqa: F401  # which takes the ops as they are when it is imported
    from fastmp.ops.core import registry

    chosen = {name: op for name, op in registry.OPS.items() if names is None or name in names}
    monkeypatch.setattr(registry, "OPS", chosen)
    assert doctor.main(["--check"]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert all(f"cpu {name} " in printed for name in chosen)


def test_doctor_check_fails_on_a_wrong_op(capsys, monkeypatch):
    from fastmp.testing import ops

    wrong = replace(ops.check_op("bias_gelu", "cpu")[0], error=1.0)
    monkeypatch.setattr(ops, "check_op", lambda name, device: [wrong])
    assert doctor.main(["--check"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_doctor_says_which_attention_is_taken(monkeypatch):
    """Also that another implementation is installed, and how it is put in place."""
    monkeypatch.setattr(doctor, "find_spec", lambda name: name.startswith("flash_attn_interface"))
    lines = doctor._attention()
    assert any(re.match(r"cpu last 1024 of 4096: merged \(", line) for line in lines)
    *_, flash, offer = lines
    assert flash == "flash attention is FA2"
    assert re.match(r'FA3 is installed; .*activate_flash_attention_impl\("FA3"\)', offer)
