"""`fastmp launch`: print the help, and the command that other programs need, before torch is imported."""

from __future__ import annotations

import shlex
from argparse import REMAINDER
from collections.abc import Sequence

from fastmp.config import Environment, ParallelConfig
from fastmp.config.command_line import Parser
from fastmp.plan.layout import fewest_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp launch` with the arguments `argv`; return the exit status."""
    arguments = list(argv or [])
    if arguments[:1] in (["-h"], ["--help"]):
        _parser().print_help()
        return 0
    from fastmp.apps.launch_main import main as launch  # imports torch

    return launch(arguments)


def launch_instead(layout: ParallelConfig, processes: str, command: str, arguments: Sequence[str]) -> str:
    """Return the error for too few processes: the sizes that need more, and the launch command.

    processes: the noun, and how many there are: "processes, got 1".
    """
    sizes = {axis: getattr(layout, axis) or 1 for axis in ("tp", "cp", "pp", "ep", "etp")}
    given = " ".join(f"--{axis} {size}" for axis, size in sizes.items() if size > 1)
    ranks = fewest_ranks(layout)
    launched = shlex.join(["fastmp", "launch", "-n", str(ranks), command, *arguments])
    return f"{given} needs {ranks} {processes}; run: {launched}"


def check_ranks(parser: Parser, layout: ParallelConfig, command: str, arguments: Sequence[str]) -> None:
    """Raise SystemExit with the command to type if the world size is no multiple of what `layout` needs."""
    world_size = Environment.read().world_size
    if world_size % fewest_ranks(layout):
        processes = f"processes or a multiple, got {world_size}"
        parser.error(launch_instead(layout, processes, command, arguments))


def _parser() -> Parser:
    """Return a parser with the most used of torchrun's options, for the help only."""
    parser = Parser(
        prog="fastmp launch",
        usage="fastmp launch [-n N] [options] PROGRAM [arguments]",
        description="Start N processes of a program with torchrun, by default one for each GPU of this "
        "machine. The exit status is that of the first rank that failed.\n\n"
        "  fastmp launch -n 2 train configs/moe-small.toml --tp 2 --ep 2\n"
        "  fastmp launch -n 8 script.py --its-option 1\n"
        "  fastmp launch --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 train FILE",
        epilog="All other options of torchrun are accepted as well: torchrun --help",
    )
    add = parser.add_argument
    add("program", metavar="PROGRAM", help="train, generate, eval, or a script")
    add("arguments", metavar="arguments", nargs=REMAINDER, help="options of the program")
    add("-n", "--nproc-per-node", metavar="N", help="processes on this machine (one for each GPU; else 1)")
    add("-m", "--module", action="store_true", help="PROGRAM is a Python module")
    add("--nnodes", metavar="N", help="machines, or MIN:MAX of them in an elastic job (1)")
    add("--node-rank", metavar="N", help="number of this machine, from 0 (0)")
    add("--master-addr", metavar="HOST", help="address of machine 0")
    add("--master-port", metavar="PORT", help="free port of machine 0")
    add("--rdzv-backend", metavar="NAME", help="c10d for elastic jobs, with --rdzv-endpoint [rendezvous]")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where the machines of an elastic job meet")
    text = "restarts after a rank has failed; training resumes from its latest checkpoint (0)"
    add("--max-restarts", metavar="N", help=text)
    return parser
