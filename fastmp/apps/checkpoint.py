"""`fastmp checkpoint`: verify, inspect, reshard and diff, for checkpoints of any layout, in one process."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from fastmp.config.command_line import Parser
from fastmp.training.checkpoint.compare import differences
from fastmp.training.checkpoint.directory import by_age, checkpoint_at, whole_manifest
from fastmp.training.checkpoint.files import verify
from fastmp.training.checkpoint.format import DTYPES, MANIFEST, CheckpointError, read_manifest
from fastmp.training.checkpoint.reshard import reshard

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp checkpoint` with the arguments `argv`; returns the exit status.

    1 is an answer, that a checkpoint is damaged or that two differ; 2 says that none could be given.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except BrokenPipeError:  # who reads has seen enough, which `fastmp.apps.cli` knows
        raise
    except (CheckpointError, OSError) as error:
        print(f"fastmp checkpoint: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> Parser:
    one = "a checkpoint, or the directory of a run, whose latest one is meant"
    parser = Parser(prog="fastmp checkpoint", description="Look after checkpoints of any layout.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Namespace], int], summary: str, more: str = "") -> Any:
        made = commands.add_parser(name, help=summary, description=f"{summary}. {more}")
        made.set_defaults(run=run)
        return made

    made = command("verify", verify_command, "check every byte of checkpoints", "Status 1 if one is damaged")
    made.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, or a run: all that it has")
    made = command("inspect", inspect_command, "print what a checkpoint holds")
    made.add_argument("path", metavar="PATH", help=one)
    made.add_argument(
        "--tensors", metavar="TEXT", nargs="?", const="", help="list those with TEXT in their name"
    )
    made = command(
        "reshard",
        reshard_command,
        "write a checkpoint again, as whole tensors in a few files",
        "A run needs no such thing: it loads a checkpoint of any layout as it is",
    )
    made.add_argument("path", metavar="PATH", help=one)
    made.add_argument("out", metavar="OUT", help="a directory for checkpoints, where it is made the latest")
    made.add_argument("--files", type=_positive, default=1, metavar="N", help="files of about equal size (1)")
    made.add_argument("--weights", action="store_true", help="leave out all that only training needs")
    made = command("diff", diff_command, "compare two checkpoints", "Status 1 if they differ")
    made.add_argument("first", metavar="PATH", help=one)
    made.add_argument("second", metavar="OTHER", help="another one")
    made.add_argument("--random", action="store_true", help="compare the random states of ranks, too")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


def verify_command(options: Namespace) -> int:
    """Check every byte of the checkpoints at the paths given, all those of a run."""
    status = 0
    for given in options.paths:
        for path in _all_at(Path(given)):
            try:
                manifest = whole_manifest(path)
                verify(path, manifest, manifest.files)
            except CheckpointError as error:
                print(f"{path}: {error}")
                status = 1
                continue
            finite = "" if manifest.finite else "; it holds numbers that are not finite"
            size = _size(sum(file.bytes for file in manifest.files.values()))
            print(f"{path}: whole: step {manifest.step}, {len(manifest.tensors)} tensors, {size}{finite}")
    return status


def _all_at(path: Path) -> list[Path]:
    for directory in (path, path / "checkpoints"):
        if not (path / MANIFEST).exists() and (found := by_age(directory)):
            return [directory / str(saved.name) for saved in found]
    return [checkpoint_at(path)]


def inspect_command(options: Namespace) -> int:
    """Print what a checkpoint holds, from its manifest alone."""
    path = checkpoint_at(options.path)
    manifest = read_manifest(path)
    if options.tensors is not None:
        for name, tensor in sorted(manifest.tensors.items()):
            if options.tensors in name:
                print(f"{name}  {tensor.dtype} {list(tensor.shape)}  {len(tensor.shards)} shards")
        return 0
    finite = "" if manifest.finite else ", with numbers that are not finite"
    print(f"{path}: step {manifest.step}{finite}")
    print("layout " + json.dumps(manifest.layout, sort_keys=True))
    print("model " + json.dumps(manifest.description, sort_keys=True))
    tensors, elements, sizes = Counter[str](), Counter[str](), Counter[str]()
    for name, tensor in manifest.tensors.items():
        first, _, rest = name.partition("/")
        kind = f"{first}/*/{rest.rpartition('/')[2]}" if first == "optimizer" else first
        tensors[kind] += 1
        elements[kind] += prod(tensor.shape)
        sizes[kind] += prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    for kind in sorted(tensors):
        counts = f"{tensors[kind]:>6} tensors {elements[kind]:>14,} numbers {_size(sizes[kind]):>10}"
        print(f"  {kind:<26} {counts}")
    for name, file in sorted(manifest.files.items()):
        print(f"  {name:<26} {_size(file.bytes):>48}")
    return 0


def reshard_command(options: Namespace) -> int:
    """Write a checkpoint again, of whole tensors in as many files as asked for."""
    source = checkpoint_at(options.path)
    print(reshard(source, Path(options.out), files=options.files, weights=options.weights))
    return 0


def diff_command(options: Namespace) -> int:
    """Compare two checkpoints, whatever layouts saved them."""
    paths = checkpoint_at(options.first), checkpoint_at(options.second)
    lines = 0
    for line in differences(*paths, random=options.random):
        print(line)
        lines += 1
    if not lines:
        print("equal, bit for bit")
    return 1 if lines else 0


def _size(size: int) -> str:
    power = min(max(size.bit_length() - 1, 0) // 10, 3)
    number = f"{size / 1024**power:.1f}" if power else str(size)
    return f"{number} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
