"""Files of others: each command that reads one accepts it, or ends with one line that names it.

None waits for a pipe, reads a device to its end, shows a traceback, or prints what controls a terminal or a
number that is not finite.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from pathlib import Path

import pytest
from command_tools import status_of

from examples.megatron_paper.evaluation.zero_shot_tasks import lambada_task, wikitext_task
from examples.megatron_paper.finetuning import formats, results
from examples.megatron_paper.finetuning.selection import Point
from fastmp.apps.evaluation.journal import FORMAT, Journal
from fastmp.apps.evaluation.tasks import heldout_task
from fastmp.training.data.tokenize import load_tokenizer

RECIPE = str(Path(__file__).parents[2] / "configs" / "moe-small.toml")


def of_torch(name, start, took, cat="cpu_op", **more):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 1, "ts": start, "dur": took, **more}


MEASURED = {
    "traceEvents": [
        of_torch("fastmp.training.forward", 0, 100, "user_annotation"),
        of_torch("aten::mm", 20, 30, args={"correlation": 1}),
        of_torch("fastmp.training.optimizer", 170, 30, "user_annotation"),
    ]
}
ON_GPU = {
    "traceEvents": [
        of_torch("fastmp.training.optimizer", 0, 300, "user_annotation"),
        of_torch("cudaLaunchKernel", 1, 1, "cuda_runtime", args={"correlation": 1}),
        of_torch("nccl", 5, 9, "kernel", args={"correlation": 1, "Process Group Description": "fastmp:dp"}),
        of_torch("gemm", 5, 9, "kernel", args={"correlation": 1}),
    ]
}
NSYS = [{"Start (ns)": 1, "Duration (ns)": 5, "Name": "adamw", "Device": "0"}] * 2
ESTIMATE = {
    "otherData": {"fastmp": {"slowest": 0, "seconds": 0.1}},
    "traceEvents": [
        {"cat": "estimate", "pid": 0, "dur": 9, "args": {"what": "GEMMs", "phase": "forward", "group": ""}},
        {"cat": "estimate", "pid": 0, "dur": 9, "args": {"what": "dp", "phase": "once", "group": "dp"}},
    ],
}
CALLS = [[["all_reduce", "dp 0", [[4]], ["float32"], None]], [0], [3], [1_000_000]]
RECORD = {
    "time": 1000.0,
    "record": {
        **{"rank": 0, "host": "node1", "pid": 12, "step": 3, "phase": "forward", "where": "a.py:1"},
        **{"inside": CALLS, "calls": CALLS, "started": {"dp 0": 3}, "groups": {"dp 0": [[0, 1, 2]]}},
        **{"state": "running", "reason": "", "stalled": 1.0, "silent": 0.0, "left_at": 0.0},
    },
}
EXPERTS = {
    "kind": "experts", "step": 1, "rank_load": [1.5] * 4, "stage_load": [1.5], "stage_spread": [0.1],
}  # fmt: skip
METRICS = [
    {"kind": "run", "step": 0, "ep": 2, "expert_stages": [0] * 4}, EXPERTS, {**EXPERTS, "step": 2}
]  # fmt: skip
RESULT = {
    **{"task": "heldout", "model": "m", "nats_per_byte": 0.5, "nats_per_token": 2.0},
    **{"perplexity_per_token": 7.5, "num_tokens": 1, "num_bytes": 4},
}


def lines(content):
    return "".join(json.dumps(each) + "\n" for each in content)


def readers(folder):
    """Return the commands that need no model: the file that they read, an intact content, and the line."""
    for name, content in (("measured.json", MEASURED), ("estimate.json", ESTIMATE)):
        (folder / name).write_text(json.dumps(content))
    measured, estimate, foreign = (f"{folder}/{name}.json" for name in ("measured", "estimate", "foreign"))
    (folder / "a" / "hang").mkdir(parents=True)
    (folder / "b").mkdir()
    load = ["plan", "time", RECIPE, "--world-size", "2", "--tp", "2", "--ep", "2", "--load"]
    return {
        "measured trace": (foreign, MEASURED, ["trace", "diff", foreign, estimate]),
        "measured trace of a GPU": (foreign, ON_GPU, ["trace", "diff", foreign, estimate, "--json"]),
        "measured kernels": (foreign, NSYS, ["trace", "diff", foreign, estimate]),
        "estimate": (foreign, ESTIMATE, ["trace", "diff", measured, foreign]),
        "report of a hang": (f"{folder}/a/hang/report.json", {"text": "rank 1"}, ["hang", f"{folder}/a"]),
        "record of a rank": (f"{folder}/b/rank-00000.json", RECORD, ["hang", f"{folder}/b"]),
        "metrics": (f"{folder}/metrics.jsonl", METRICS, [*load, f"{folder}/metrics.jsonl"]),
        "result": (foreign, RESULT, ["eval", "table", foreign]),
        "recipe": (f"{folder}/r.toml", None, ["plan", "recipe", f"{folder}/r.toml", "--world-size", "1"]),
        "source of a blend": (f"{folder}/b/index.json", None, ["data", "blend", f"1 {folder}/b"]),
        "token files": (f"{folder}/b/index.json", None, ["data", "stats", f"{folder}/b"]),
        "corpus of Megatron-LM": (f"{folder}/m.idx", None, ["data", "stats", f"{folder}/m"]),
        "checkpoint": (f"{folder}/b/manifest.json", None, ["checkpoint", "inspect", f"{folder}/b"]),
        "model of transformers": (f"{folder}/b/config.json", None, ["hf", "import", f"{folder}/b"]),
    }


NAMES = (  # those with an intact content, and the others
    *("measured trace", "measured trace of a GPU", "measured kernels", "estimate", "report of a hang"),
    *("record of a rank", "metrics", "result"),
)
OTHERS = ("recipe", "source of a blend", "token files", "corpus of Megatron-LM", "checkpoint")
OTHERS += ("model of transformers",)
HOSTILE = [
    *(None, True, 0, -1, -0.5, 1e300, 1e-320, 10**30, 10**400, float("nan"), float("inf")),
    *([], {}, [[1]], {"a": 1}, "\x1b[2J\r\u202e", "\ud800", "1e999", "x" * 10_000),
]
PERPLEXITY = f"2.0000{'inf':>22}"  # of a result, where it may be infinite
RAW = {
    "nothing": b"",
    "deep": b"[" * 100_000,
    "deep and closed": b'{"a":' * 900 + b"1" + b"}" * 900,
    "digits": b"[" + b"9" * 5000 + b"]",
    "not finite": b"NaN",
    "too large": b"[1e999]",
    "escapes": b'{"text": 1, "\\u001b[2J\\n": "\\u001b[2J"}',
    "surrogate": b'{"task": "\\ud800", "\\udfff": [], "text": 5}',
    "bytes": bytes(range(256)),
}


def check_answer(status, said, path, is_error=True):
    """Check that a command has answered as it should, with an error if `is_error`."""
    assert not re.search("[^\t\n -~\xa0-\ud7ff\ue000-\U0010ffff]", said.out + said.err)
    if status == 0 and not is_error:
        assert not said.err and not re.search(r"\bnan\b|\binf\b", said.out.replace(PERPLEXITY, ""))
        return
    assert status in (1, 2) and not said.out
    assert said.err.startswith("fastmp ") and path in said.err and len(said.err.splitlines()) == 1


@contextlib.contextmanager
def irregular(kind, path):
    """Put something that is no regular file at `path`."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        os.mkdir(path)
    else:
        os.symlink("/dev/zero" if kind == "device" else path, path)
    yield
    os.rmdir(path) if kind == "directory" else os.unlink(path)


IRREGULAR = ("pipe", "directory", "device", "link to itself")


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_commands_answer_files_of_another_kind(name, tmp_path, capsys):
    path, content, command = readers(tmp_path)[name]
    named = str(tmp_path) if content is None else path  # the directory may count as empty
    for kind in IRREGULAR:
        if kind == "link to itself" and command[0] == "hang":
            continue  # as if it were absent
        with irregular(kind, path):
            check_answer(status_of(command), capsys.readouterr(), named)
    for raw in list(RAW.values())[name == "recipe" :]:  # an empty recipe is one
        Path(path).write_bytes(raw + b"\n")
        check_answer(status_of(command), capsys.readouterr(), named)


def replaced(content, values):
    """Yield copies of a JSON document, each with a value in the place of one of its parts, or without it."""

    def places(part):
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            yield part, key
            if isinstance(part[key], dict | list):
                yield from places(part[key])

    for number in range(sum(1 for _ in places(content))):
        for value in (..., *values):
            changed = copy.deepcopy(content)
            part, key = next(place for at, place in enumerate(places(changed)) if at == number)
            if value is ...:
                del part[key]
            else:
                part[key] = copy.deepcopy(value)
            yield changed


SLOW = ("measured trace", "measured trace of a GPU", "record of a rank", "metrics")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in NAMES]
)
def test_commands_answer_any_value_in_the_place_of_another(name, tmp_path, capsys):
    path, content, command = readers(tmp_path)[name]
    write = lines if path.endswith(".jsonl") else json.dumps
    Path(path).write_text(write(content))
    assert status_of(command) == 0
    capsys.readouterr()
    for changed in replaced(content, HOSTILE):
        Path(path).write_text(write(changed))
        check_answer(status_of(command), capsys.readouterr(), path, is_error=False)


def journal(path):
    Journal(path, {"task": "wikitext"}).close()


READERS = {
    "journal": journal,
    "WikiText": lambda path: wikitext_task(path, load_tokenizer("byte")),
    "LAMBADA": lambda path: lambada_task(path, load_tokenizer("byte"), max_seq_len=64),
    "held-out text": lambda path: heldout_task(path, load_tokenizer("byte")),
    "MNLI": formats.read_mnli,
    "QQP": formats.read_qqp,
    "SQuAD 1.1": formats.read_squad1,
    "SQuAD 2.0": formats.read_squad2,
    "result of fine-tuning": lambda path: results.read_result(path, Point(1, 0.1), 0, "accuracy"),
    "tokenizer": load_tokenizer,
}


def check_error(read, path):
    with pytest.raises(ValueError) as raised:
        read(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", READERS)
def test_readers_answer_files_of_another_kind(name, tmp_path):
    path = tmp_path / "foreign"
    for kind in IRREGULAR:
        if kind == "directory" and name in ("held-out text", "tokenizer"):
            continue  # a directory is fine there
        if kind == "link to itself" and name == "result of fine-tuning":
            continue  # as if it were absent
        with irregular(kind, path):
            check_error(READERS[name], path)


@pytest.mark.parametrize("name", [each for each in READERS if each not in ("WikiText", "held-out text")])
def test_readers_answer_hostile_content(name, tmp_path):
    path = tmp_path / "foreign"
    for raw in RAW.values():
        for start in (b"", json.dumps({"format": FORMAT, "task": "wikitext"}).encode() + b"\n"):
            if raw or (name != "journal"):
                path.write_bytes(start * (name == "journal") + raw + b"\n")
                check_error(READERS[name], path)
