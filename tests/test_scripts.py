"""The files in scripts/ that start training elsewhere, with stand-ins for what only a cluster has."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml

from fastmp.apps import launch_main
from fastmp.config.recipe import parse_arguments
from fastmp.plan.layout import check_layout
from fastmp.training.data.corpus import build
from fastmp.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
TINY = """
[model]
num_layers = 1
hidden_size = 16
num_heads = 2
max_seq_len = 32
[data]
path = {tokens!r}
seq_len = 32
micro_batch_size = 4
[train]
name = "tiny"
run_dir = {runs!r}
global_batch_size = 8
eval_interval = 0
log_interval = 1
[checkpoint]
interval = 2
"""

# srun: two tasks, here agents, to which SIGUSR1 is passed on; at SIGTERM the real one kills its tasks.
SRUN = """#!{python}
import os, signal, subprocess, sys
tasks = [subprocess.Popen(sys.argv[1:], env={{**os.environ, "SLURM_PROCID": str(i)}}) for i in range(2)]
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
PROGRAMS = {
    "srun": SRUN,
    "scontrol": '#!/bin/sh\necho "$@" >> {folder}/scontrol\n',
    "hostname": "#!/bin/sh\necho localhost\n",
    "fastmp": '#!/bin/sh\nexec {python} -m fastmp "$@"\n',
    "torchrun": '#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n',
}


@pytest.fixture
def job(tmp_path, monkeypatch) -> Path:
    """A folder with a tiny recipe, and stand-ins for a cluster's programs on PATH."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    tokens = build([str(text)], tmp_path / "tokens")
    (tmp_path / "tiny.toml").write_text(TINY.format(tokens=str(tokens), runs=str(tmp_path)))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, source in PROGRAMS.items():
        (programs / name).write_text(source.format(python=sys.executable, folder=tmp_path))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def steps(job: Path) -> list[int]:
    metrics = job / "tiny" / "metrics.jsonl"
    return [r["step"] for r in read_metrics(metrics) if r["kind"] == "train"] if metrics.exists() else []


@pytest.mark.exhaustive
def test_a_job_of_slurm_saves_before_its_time_is_up_and_goes_on_when_it_is_queued_again(job, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    command = ["bash", ROOT / "scripts" / "train.sbatch", "--recipe", job / "tiny.toml", "--train.steps"]
    with (job / "log").open("w") as log:
        first = subprocess.Popen([*command, "100000"], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while len(steps(job)) < 3 and first.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            first.send_signal(signal.SIGUSR1)  # as --signal=B:USR1 does
            assert first.wait(timeout=60) == 0, (job / "log").read_text()
        finally:
            first.kill()
    said = (job / "log").read_text()
    assert "2 ranks: TP 1, DP 2" in said and "no checkpoint in" in said and "saved" in said, said
    assert (job / "scontrol").read_text() == "requeue 4711\n"
    done = steps(job)
    assert done == list(range(1, done[-1] + 1))

    again = subprocess.run([*command, str(done[-1] + 3)], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resumed after step {done[-1]}" in again.stdout
    assert steps(job) == list(range(1, done[-1] + 4))
    assert (job / "scontrol").read_text() == "requeue 4711\n"  # a run that is over is not queued again


@pytest.mark.exhaustive
def test_two_machines_go_on_after_one_has_lost_a_rank(job):
    """Each torchrun counts its own restarts; the ranks agree, and load the same checkpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    command = [
        "fastmp",
        "launch",
        "-n",
        "1",
        "--nnodes",
        "2",
        "--max-restarts",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    command += [
        "--rdzv-endpoint",
        endpoint,
        "train",
        "--recipe",
        str(job / "tiny.toml"),
        "--train.steps",
        "60",
    ]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not (job / "tiny" / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (rank,) = psutil.Process(agents[1].pid).children()
        rank.kill()
        said = [agent.communicate(timeout=150)[0].decode(errors="replace") for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "resumed after step" in "".join(said)
    assert steps(job) == list(range(1, 61))


@pytest.mark.full
@pytest.mark.skipif(find_spec("torchx") is None, reason="torchx is not installed: pip install torchx")
def test_torchx_runs_the_line_that_docs_show(job):
    """On this machine, its engine local_cwd; Slurm, Kubernetes and AWS Batch take the same line."""
    line = re.search(r"torchx run -s (.*) -- train .*", (ROOT / "docs" / "many-machines.md").read_text())
    command = [sys.executable, "-m", "torchx.cli.main", "run", "-s", *line[1].split(), "--", "train"]
    options = ["--recipe", str(job / "tiny.toml"), "--train.steps", "3"]
    done = subprocess.run([*command, *options], cwd=job, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "2 ranks" in done.stderr, done.stdout + done.stderr
    assert steps(job) == [1, 2, 3]


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")
def test_ray_train_s_workers_train_and_go_on(job):
    for total in (4, 6):
        command = [sys.executable, ROOT / "scripts" / "ray_train.py", "2", "--recipe", job / "tiny.toml"]
        done = subprocess.run(
            [*map(str, command), "--train.steps", str(total)],
            cwd=job,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0 and "2 ranks" in done.stdout, done.stdout + done.stderr
        assert steps(job) == list(range(1, total + 1))


# The fields of PyTorchJob (kubeflow/training-operator, pytorch_types.go) and of the pods in it (Kubernetes,
# core/v1), and those of a SkyPilot task (docs.skypilot.co, yaml-spec) that training may want. A name with
# "!" must be there, "*" is any name, a list has such elements, and a set has the values that are allowed.
CONTAINER = {
    "name!": {"pytorch"},
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str}],
    "resources": {"limits": {"*": (int, str)}, "requests": {"*": (int, str)}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
VOLUME = {
    "name!": str,
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": str},
}
POD = {"containers!": [CONTAINER], "volumes": [VOLUME], "terminationGracePeriodSeconds": int}
REPLICAS = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template!": {"metadata": {"*": {"*": str}}, "spec!": POD},
}
ELASTIC = {
    **{"rdzvBackend": {"c10d", "etcd", "etcd-v2"}, "rdzvPort": int, "rdzvHost": str, "rdzvId": str},
    **{"minReplicas": int, "maxReplicas": int, "maxRestarts": int, "standalone": bool},
}
PYTORCH_JOB = {
    "apiVersion!": {"kubeflow.org/v1"},
    "kind!": {"PyTorchJob"},
    "metadata!": {"name!": str, "namespace": str, "labels": {"*": str}},
    "spec!": {
        "nprocPerNode": str,
        "elasticPolicy": ELASTIC,
        "pytorchReplicaSpecs!": {"Master": REPLICAS, "Worker": REPLICAS},
    },
}
SKYPILOT_TASK = {
    **{"name": str, "workdir": str, "num_nodes": int, "setup": str, "run": str},
    **{"envs": {"*": (str, int)}, "secrets": {"*": str}, "volumes": {"*": str}},
    "resources": {
        **{"infra": str, "accelerators": str, "cpus": (int, str), "memory": (int, str)},
        **{"use_spot": bool, "image_id": str, "disk_size": (int, str), "network_tier": str},
        "job_recovery": {"strategy": str, "max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
    },
}


def misfits(value, schema, at="") -> list[str]:
    """Return the parts of `value` that differ from `schema`."""
    if isinstance(schema, dict) and isinstance(value, dict):
        known = {name.rstrip("!"): each for name, each in schema.items()}
        missing = [
            f"{at}.{name[:-1]} is missing" for name in schema if name[-1] == "!" and name[:-1] not in value
        ]
        unknown = [f"{at}.{name} is unknown" for name in value if name not in known and "*" not in known]
        inner = [
            misfit
            for name, each in value.items()
            if name in known or "*" in known
            for misfit in misfits(each, known.get(name, known.get("*")), f"{at}.{name}")
        ]
        return missing + unknown + inner
    if isinstance(schema, list) and isinstance(value, list):
        return [misfit for i, each in enumerate(value) for misfit in misfits(each, schema[0], f"{at}[{i}]")]
    if isinstance(schema, set):
        return [] if value in schema else [f"{at} is {value!r}"]
    fits = (
        not isinstance(schema, (dict, list))
        and isinstance(value, schema)
        and not (isinstance(value, bool) and schema is not bool)
    )
    return [] if fits else [f"{at} is {value!r}"]


@pytest.mark.parametrize(("name", "schema"), [("pytorchjob", PYTORCH_JOB), ("skypilot", SKYPILOT_TASK)])
def test_files_for_other_engines_are_as_their_schemas_say(name, schema):
    job = yaml.safe_load((ROOT / "scripts" / f"{name}.yaml").read_text())
    assert misfits(job, schema) == []
    first = next(iter(job))
    assert misfits({**job, "more": 1}, schema) == [".more is unknown"]
    assert misfits({**job, first: 1}, schema) == [f".{first} is 1"]


def test_what_is_missing_or_wrong_deep_in_a_file_is_seen():
    job = yaml.safe_load((ROOT / "scripts" / "pytorchjob.yaml").read_text())
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    del pod["containers"][0]["image"]
    pod["volumes"][0]["emptydir"] = {}
    pod["terminationGracePeriodSeconds"] = True
    at = ".spec.pytorchReplicaSpecs.Worker.template.spec"
    assert misfits(job, PYTORCH_JOB) == [
        f"{at}.terminationGracePeriodSeconds is True",
        f"{at}.containers[0].image is missing",
        f"{at}.volumes[0].emptydir is unknown",
    ]


def test_the_commands_in_these_files_are_ones_that_fastmp_takes(monkeypatch):
    """Their options are read as `fastmp launch` and `fastmp train` read them, for both machines' ranks."""
    container = yaml.safe_load((ROOT / "scripts" / "pytorchjob.yaml").read_text())["spec"]
    container = container["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    run = yaml.safe_load((ROOT / "scripts" / "skypilot.yaml").read_text())["run"]
    monkeypatch.chdir(ROOT)
    for variable in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "1")  # launch sets those that are not set
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    for words in ([*container["command"], *container["args"]], shlex.split(run.replace("\\\n", " "))):
        monkeypatch.setenv(
            "PET_NNODES", "2:2"
        )  # what the operator sets; SkyPilot's file has an option for it
        assert words[:2] == ["fastmp", "launch"]
        args = launch_main._read_options(words[2:])
        assert args.rdzv_backend != "loopback" and args.training_script_args[0] == "train"
        recipe = parse_arguments(args.training_script_args[1:])
        assert recipe.checkpoint.resume == "auto" and check_layout(recipe, 16) is None
