"""Damaged and hostile inputs: token files, tokenizers, recipes and metrics, mutated at random.

An input is read as its content or as a legal other content, or it is refused with one ValueError that names
the file. It never takes long, much memory or another kind of error, and nothing in it is run: an audit hook
sees no code compiled or executed, nothing unpickled or imported, no process, no socket, and no file outside
the folder of the case. Cases run in forked children with a limit on their address space.

Checksums are made right again in the cases that are called signed, so that what lies behind them is reached.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from mutations import PARTS, TOML, mutate_bytes, mutate_json
from soak import Outcome, Progress, main

from fastmp.config import Recipe
from fastmp.config.data_files import expected_vocab_size
from fastmp.config.recipe import load_recipe
from fastmp.plan.layout import problems
from fastmp.plan.resources import recipe_facts
from fastmp.training.data.corpus import build
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index, verify
from fastmp.training.data.tokenize import load_tokenizer
from fastmp.training.metrics import read_metrics

ADDRESS_SPACE = 4 << 30  # bytes
GROWTH = 256 << 20  # bytes of resident memory that the cases of a child may add at their peak
SECONDS = 20.0  # for one case, on a machine that does other things too
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
FORBIDDEN = (
    "compile",
    "exec",
    "import",
    "pickle.",
    "marshal.",
    "subprocess.",
    "os.system",
    "os.exec",
    "socket.",
)
FORBIDDEN += ("os.spawn", "os.posix_spawn", "os.fork", "ctypes.", "os.remove", "os.rename", "shutil.")


@dataclass(frozen=True)
class Family:
    """A kind of cases. `make` writes the files of a case and returns the one that is to be read.

    `read` reads it and says what is wrong with what was accepted; an empty text: nothing.
    """

    name: str
    cases: int
    make: Callable[[random.Random, Path], Path]
    read: Callable[[Path], str]


def crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Inputs:
    """The intact files of `home`, from which cases are made in a folder of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        text = "".join(f"line {i} of a text to learn from, and to damage\n" for i in range(300))
        (home / "text.txt").write_text(text)
        options = {"tokenizer": "bpe", "vocab_size": 300, "validation_fraction": 0.2}
        self.dataset = build([str(home / "text.txt")], home / "dataset", **options)
        self.names = sorted(path.name for path in self.dataset.iterdir())
        self.raw = {name: (self.dataset / name).read_bytes() for name in self.names}
        self.index = read_index(self.dataset)
        self.recipes = [path.read_bytes() for path in CONFIGS] + [_all_fields()]
        for raw in self.recipes:  # the annotations of fields are evaluated once
            (home / "recipe.toml").write_bytes(raw)
            load_recipe(home / "recipe.toml")
        kinds = ["run", "train", "experts", "eval"]
        lines = [
            {"kind": kinds[i % 4], "step": i, "loss": 1.5, "lr": 1e-3, "max_load": [1.0]} for i in range(40)
        ]
        self.metrics = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def fresh(self, folder: Path) -> Path:
        copy = folder / "dataset"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, raw in self.raw.items():
            (copy / name).write_bytes(raw)
        return copy

    def families(self) -> list[Family]:
        return [
            Family("index.json", 5000, self._make_index, self._read_dataset),
            Family("index.json, signed", 5000, self._make_signed_index, self._read_signed),
            Family("token files", 1500, self._make_token_file, self._read_dataset),
            Family("tokenizer.json, signed", 1500, self._make_signed_tokenizer, self._read_signed),
            Family("tokenizer.json", 1500, self._make_tokenizer, self._read_tokenizer),
            Family("recipe", 4000, self._make_recipe, self._read_recipe),
            Family("metrics.jsonl", 2000, self._make_metrics, self._read_metrics),
            Family("no regular files", 500, self._make_irregular, self._read_any),
        ]

    def _make_index(self, draw: random.Random, folder: Path) -> Path:
        path = self.fresh(folder) / "index.json"
        path.write_bytes(mutate_bytes(draw, self.raw["index.json"]))
        return path

    def _make_signed_index(self, draw: random.Random, folder: Path) -> Path:
        path = self.fresh(folder) / "index.json"
        content = mutate_json(draw, self.raw["index.json"].decode(), "content")["content"]
        if draw.random() < 0.02:
            content["source"] = {"deep": deep(draw.randrange(900))}
        path.write_text(json.dumps({"crc32": crc(content), "content": content}))
        return path

    def _make_token_file(self, draw: random.Random, folder: Path) -> Path:
        path = self.fresh(folder) / draw.choice(self.names)
        path.write_bytes(mutate_bytes(draw, self.raw[path.name]))
        return path

    def _make_signed_tokenizer(self, draw: random.Random, folder: Path) -> Path:
        path = self.fresh(folder) / "tokenizer.json"
        self._make_tokenizer(draw, path.parent)
        content = json.loads(self.raw["index.json"])["content"]
        content["tokenizer_crc32"] = zlib.crc32(path.read_bytes())
        (path.parent / "index.json").write_text(json.dumps({"crc32": crc(content), "content": content}))
        return path

    def _make_tokenizer(self, draw: random.Random, folder: Path) -> Path:
        path, raw = folder / "tokenizer.json", self.raw["tokenizer.json"]
        kind = draw.randrange(3)
        if kind == 0:
            path.write_bytes(mutate_bytes(draw, raw))
            return path
        document = mutate_json(draw, raw.decode()) if kind == 1 else json.loads(raw)
        if kind == 2:
            places = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "padding", "truncation")
            document[draw.choice(places)] = draw.choice(PARTS)
        path.write_text(json.dumps(document))
        return path

    def _make_recipe(self, draw: random.Random, folder: Path) -> Path:
        path, raw = folder / "recipe.toml", draw.choice(self.recipes)
        if draw.random() < 0.4:
            path.write_bytes(mutate_bytes(draw, raw))
            return path
        lines = raw.decode().split("\n")
        for _ in range(draw.randint(1, 3)):
            at = draw.choice([i for i, line in enumerate(lines) if "=" in line])
            name = lines[at].partition("=")[0]
            kind = draw.randrange(8)
            if kind == 0:
                keys = ["a", "__class__", name[:-2], "a.b.c", name.strip() + ".x", "x" * 99]
                lines[at] = f"{draw.choice(keys)} = 1"
            elif kind == 1:
                lines[at] += f"\n{lines[at]}"
            elif kind == 2:
                lines[at] = f"{name.strip()}{'.a' * draw.choice((1, 20, 190, 2000, 30_000))} = 1"
            else:
                lines[at] = f"{name}= {draw.choice(TOML)}"
        path.write_text("\n".join(lines))
        return path

    def _make_metrics(self, draw: random.Random, folder: Path) -> Path:
        path = folder / "metrics.jsonl"
        if draw.random() < 0.5:
            path.write_bytes(mutate_bytes(draw, self.metrics))
            return path
        lines = self.metrics.decode().splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(mutate_json(draw, lines[at]))
        path.write_text("\n".join(lines) + "\n")
        return path

    def _make_irregular(self, draw: random.Random, folder: Path) -> Path:
        """Something that is no regular file, in the place of one."""
        places = [*(self.fresh(folder) / name for name in self.names)]
        places += [folder / name for name in ("recipe.toml", "metrics.jsonl", "tokenizer.json")]
        path = draw.choice(places)
        path.unlink(missing_ok=True)
        kind = draw.randrange(7)
        if kind == 0:
            path.mkdir()
        elif kind == 1:
            os.mkfifo(path)
        elif kind == 2:
            with socket.socket(socket.AF_UNIX) as server:
                folder_descriptor = os.open(path.parent, os.O_RDONLY)  # names of sockets are short
                server.bind(f"/proc/self/fd/{folder_descriptor}/{path.name}")
                os.close(folder_descriptor)
        else:
            path.symlink_to(("absent", path.name, "/dev/zero", "/dev/tty", "..")[kind - 3 if kind < 7 else 4])
        return path

    def _read_dataset(self, path: Path) -> str:
        """Whatever is accepted without checksums made right is what was written."""
        directory = path.parent
        index = read_index(directory)
        if open_tokenizer(directory, index).to_json() != self.raw["tokenizer.json"].decode():
            return "another tokenizer was accepted"
        for name in index.splits:
            verify(open_split(directory, index, name))
        same = index == self.index and all((directory / n).read_bytes() == self.raw[n] for n in self._data)
        return "" if same else "other content was accepted"

    @property
    def _data(self) -> list[str]:
        return [name for name in self.names if name != "index.json"]

    def _read_signed(self, path: Path) -> str:
        directory = path.parent
        expected_vocab_size(replace(Recipe().data, path=str(directory)))
        index = read_index(directory)
        (directory / "index.json").write_text(index.to_json())
        if read_index(directory) != index:
            return "an index that does not survive writing was accepted"
        tokenizer = open_tokenizer(directory, index)
        for name in index.splits:
            verify(open_split(directory, index, name))
        return _wrong_tokenizer(tokenizer, path)

    def _read_tokenizer(self, path: Path) -> str:
        return _wrong_tokenizer(load_tokenizer(path), path)

    def _read_recipe(self, path: Path) -> str:
        recipe = load_recipe(path)
        wrong = list(_wrong_values(recipe, ""))
        if wrong or load_recipe(path) != recipe:
            return f"a recipe that is not legal was accepted: {wrong}"
        problems(recipe, 8)
        if not recipe.model.vocab_size:
            recipe = replace(recipe, model=replace(recipe.model, vocab_size=257))
        if not problems(recipe, 1):
            recipe_facts(recipe, 1)
        return ""

    def _read_metrics(self, path: Path) -> str:
        for record in read_metrics(path):
            float(record["step"])
            if not isinstance(record["kind"], str) or type(record["step"]) is not int or record["step"] < 0:
                return f"a record that is not legal was accepted: {record}"
        return ""

    def _read_any(self, path: Path) -> str:
        if path.name == "recipe.toml":
            return self._read_recipe(path)
        if path.name == "metrics.jsonl":
            return self._read_metrics(path)
        return self._read_dataset(path) if path.parent.name == "dataset" else self._read_tokenizer(path)


def _all_fields() -> bytes:
    """A recipe that names every field with its default."""
    lines: list[str] = []

    def add(config: Any, table: str) -> None:
        lines.append(f"[{table}]")
        below = []
        for each in fields(config):
            value = getattr(config, each.name)
            if is_dataclass(value):
                below.append((value, f"{table}.{each.name}"))
            elif value is not None:
                lines.append(f"{each.name} = {json.dumps(value)}")
        for value, name in below:
            add(value, name)

    recipe = Recipe()
    for each in fields(recipe):
        add(getattr(recipe, each.name), each.name)
    return "\n".join(lines).encode()


def _wrong_values(config: Any, table: str) -> Iterator[str]:
    """Values that no recipe should have: numbers beyond 64 bits or not finite, text with null bytes."""
    for each in fields(config):
        value, name = getattr(config, each.name), f"{table}.{each.name}".strip(".")
        if is_dataclass(value):
            yield from _wrong_values(value, name)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            finite = not isinstance(item, float) or math.isfinite(item)
            small = type(item) is not int or abs(item) < 1 << 63
            if not (finite and small) or (isinstance(item, str) and "\0" in item):
                yield f"{name} = {item!r}"


PROBE = "A line of text,\n with naïve ünïcode, numbers 1234 and <|endoftext|> in it.\n"


def _wrong_tokenizer(tokenizer: Any, path: Path) -> str:
    """A tokenizer that was accepted encodes text as tokens of its vocabulary, or names its file."""
    if not 0 <= tokenizer.end_of_text < tokenizer.vocab_size:
        return f"end-of-text {tokenizer.end_of_text} is not in the vocabulary of {tokenizer.vocab_size}"
    try:
        ids = tokenizer.encode(PROBE)
    except ValueError as error:
        return "" if str(path) in str(error) else f"the error of encode does not name the file: {error}"
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        return f"ids {ids.min()} to {ids.max()} are not below {tokenizer.vocab_size}"
    try:
        tokenizer.decode_bytes(ids)  # which the writer of token files compares with the text
    except ValueError as error:
        return "" if str(path) in str(error) else f"the error of decode does not name the file: {error}"
    return ""


class Audit:
    """Notes what a reader does beside reading the files of `folder`, while armed."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[str] = []
        self.armed = False
        self._folder = str(folder)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "open":
            path, mode = arguments[0], arguments[1]
            if isinstance(path, bytes):
                path = os.fsdecode(path)
            if isinstance(path, str | os.PathLike) and not str(path).startswith(self._folder):
                self.seen.append(f"open {path} {mode}")
        elif event.startswith(FORBIDDEN):
            self.seen.append(f"{event} {arguments}"[:200])


def run_case(family: Family, number: int, folder: Path, audit: Audit) -> str:
    """Return the error in the reading of case `number`, or an empty text."""
    shutil.rmtree(folder)
    folder.mkdir()
    path = family.make(random.Random(f"{family.name} {number}"), folder)
    audit.seen.clear()
    audit.armed = True
    try:
        wrong = family.read(path)
    except ValueError as error:
        wrong = "" if str(folder) in str(error) else f"the error does not name the file: {error!r}"
        if "Traceback" in str(error) or len(str(error)) > 1 << 20:
            wrong = f"the error is no message: {str(error)[:200]}"
    except BaseException:
        wrong = traceback.format_exc(limit=-3)
    finally:
        audit.armed = False
    return wrong or ", ".join(audit.seen)


def child(family: Family, first: int, last: int, folder: Path, state: mmap.mmap, report: Any) -> None:
    """Run cases; `state` says which one is running, and the growth of resident memory in KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESS_SPACE,) * 2)
    audit = Audit(folder)
    for number in range(-1, last):  # one before, which imports what is imported late
        if number == -1 or number >= first:
            wrong = run_case(family, number, folder, audit)
            if number == -1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                continue
            growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            if wrong:
                report.write(json.dumps([number, wrong]) + "\n")
                report.flush()
            state[:] = struct.pack("qq", number + 1, growth)


def run_family(family: Family, cases: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    progress, failures, peak, first, began = Progress(family.name, cases), [], 0, 0, time.monotonic()
    with mmap.mmap(-1, 16) as state, tempfile.TemporaryFile("w+") as report:
        while first < cases:
            state[:] = struct.pack("qq", first, 0)
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    with open(os.devnull, "w") as nowhere:
                        os.dup2(nowhere.fileno(), 2)  # what a Rust library says when it panics
                    child(family, first, cases, folder, state, report)
                    os._exit(0)
                os._exit(1)
            seen, since = first, time.monotonic()
            while not os.waitpid(pid, os.WNOHANG)[0]:
                time.sleep(0.005)
                done = struct.unpack("qq", state[:])[0]
                progress.at(done)
                if done != seen:
                    seen, since = done, time.monotonic()
                elif time.monotonic() - since > SECONDS:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
            done, growth = struct.unpack("qq", state[:])
            peak = max(peak, growth)
            if done < cases:
                failures.append(f"{family.name} {done}: the process hung or died")
            first = done + 1
        report.seek(0)
        failures += [f"{family.name} {number}: {wrong}" for number, wrong in map(json.loads, report)]
    if peak * 1024 > GROWTH:
        failures.append(f"{family.name}: resident memory grew by {peak >> 10} MiB")
    row = {"family": family.name, "cases": cases, "failures": len(failures), "peak MiB": peak >> 10}
    return {**row, "seconds": round(time.monotonic() - began, 1)}, failures


def run_families(make: Callable[[Path], Any], quick: bool) -> Outcome:
    """Run all cases of `make(home).families()`, or a fiftieth of them; return their table."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as home:
        families, folder = make(Path(home)).families(), Path(home) / "case"
        folder.mkdir()
        for family in families:
            row, failures = run_family(family, family.cases // (50 if quick else 1), folder)
            outcome.rows.append(row)
            outcome.failures += failures
            print(row, flush=True)
    return outcome


def run(quick: bool) -> Outcome:
    return run_families(Inputs, quick)


if __name__ == "__main__":
    sys.exit(main("inputs", run))
