"""`fastmp checkpoint`: verify, inspect, reshard and compare checkpoints in one process.

torch is imported by the commands, after the arguments are read.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from fastmp.config.command_line import Parser, exit_status, number
from fastmp.config.console import to_stdout

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp checkpoint` with the arguments `argv`; return the exit status.

    Status 1: a checkpoint is damaged, or two differ. Status 2: invalid arguments or unreadable files.
    """
    options = _parser().parse_args(argv)
    return exit_status("fastmp checkpoint", lambda: options.run(options))


def _parser() -> Parser:
    one = "a checkpoint, or the directory of a run for its latest one"
    parser = Parser(
        prog="fastmp checkpoint",
        description="Verify, inspect, reshard and compare checkpoints of any parallel layout.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Namespace], int], summary: str, example: str, more: str = ""
    ) -> Any:
        text = f"{_sentence(summary)}{more}\n\n  fastmp checkpoint {name} {example}"
        made = commands.add_parser(name, help=summary, description=text)
        made.set_defaults(run=run)
        return made

    text = " Status 1 if one is damaged."
    made = command("verify", verify_command, "check every byte of checkpoints", "runs/gpt", text)
    made.add_argument(
        "paths", nargs="+", metavar="PATH", help="a checkpoint, or a run for all of its checkpoints"
    )
    made = command(
        "inspect", inspect_command, "print the contents of a checkpoint", "runs/gpt --tensors norm"
    )
    made.add_argument("path", metavar="PATH", help=one)
    made.add_argument(
        "--tensors", metavar="TEXT", nargs="?", const="", help="list the tensors with TEXT in their name"
    )
    made = command(
        "reshard",
        reshard_command,
        "rewrite a checkpoint with unsharded tensors in a few files",
        "runs/gpt runs/gpt-weights --weights",
        " Not needed for training, which loads a checkpoint of any parallel layout.",
    )
    made.add_argument("path", metavar="PATH", help=one)
    made.add_argument("out", metavar="OUT", help="a directory of checkpoints, in which it becomes the latest")
    made.add_argument(
        "--files", type=number(int, 1), default=1, metavar="N", help="number of files of about equal size (1)"
    )
    made.add_argument(
        "--weights", action="store_true", help="write weights only, without optimizer and random states"
    )
    text = " Status 1 if they differ."
    made = command("diff", diff_command, "compare two checkpoints", "runs/gpt runs/gpt-2", text)
    made.add_argument("first", metavar="PATH", help=one)
    made.add_argument("second", metavar="OTHER", help="another checkpoint")
    made.add_argument("--random", action="store_true", help="also compare the random states of ranks")
    return parser


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def verify_command(options: Namespace) -> int:
    """Verify the checksums of the checkpoints at the given paths."""
    from fastmp.training.checkpoint.directory import whole_manifest
    from fastmp.training.checkpoint.format import CheckpointError
    from fastmp.training.checkpoint.tensor_files import verify

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
            print(f"{path}: intact: step {manifest.step}, {len(manifest.tensors)} tensors, {size}{finite}")
    return status


def _all_at(path: Path) -> list[Path]:
    from fastmp.training.checkpoint.directory import by_age, checkpoint_at
    from fastmp.training.checkpoint.format import MANIFEST

    for directory in (path, path / "checkpoints"):
        if not (path / MANIFEST).exists() and (found := by_age(directory)):
            return [directory / str(saved.name) for saved in found]
    return [checkpoint_at(path)]


def inspect_command(options: Namespace) -> int:
    """Print the contents of a checkpoint, reading its manifest only."""
    from fastmp.training.checkpoint.directory import checkpoint_at
    from fastmp.training.checkpoint.format import DTYPES, read_manifest

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
    """Rewrite a checkpoint with unsharded tensors in the requested number of files."""
    from fastmp.training.checkpoint.directory import checkpoint_at
    from fastmp.training.checkpoint.reshard import reshard

    source = checkpoint_at(options.path)
    to_stdout(f"{reshard(source, Path(options.out), files=options.files, weights=options.weights)}")
    return 0


def diff_command(options: Namespace) -> int:
    """Compare two checkpoints of any parallel layouts."""
    from fastmp.training.checkpoint.diff import differences
    from fastmp.training.checkpoint.directory import checkpoint_at

    paths = checkpoint_at(options.first), checkpoint_at(options.second)
    lines = 0
    for line in differences(*paths, random=options.random):
        print(line)
        lines += 1
    if not lines:
        print("bitwise equal")
    return 1 if lines else 0


def _size(size: int) -> str:
    power = min(max(size.bit_length() - 1, 0) // 10, 3)
    number = f"{size / 1024**power:.1f}" if power else str(size)
    return f"{number} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
