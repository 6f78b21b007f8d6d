"""`fastmp launch` after its help: torchrun with defaults for training, and without its tracebacks.

Without options it starts one rank a GPU of this machine. They meet at the loopback address, and each restart
gets a new store: torchrun's own is open to the network, and keeps what dead ranks have left in it.
"""

from __future__ import annotations

import difflib
import logging
import os
import shlex
import socket
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import determine_local_world_size, get_args_parser, run

from fastmp.apps.signals import work_is_saved
from fastmp.config import Environment, set_default_variables
from fastmp.config.console import to_stderr
from fastmp.distributed.rendezvous import LOOPBACK, loopback_listener

__all__ = ["main"]

PROGRAMS = ("train", "generate", "eval")
_RANKS = {
    *("--gpus", "--num-gpus", "--ngpus", "-np", "--np", "--nproc", "--ranks", "--world-size"),
    *("--num-processes", "--nprocs", "--n-gpus", "--gpus-per-node", "-N"),
}
SAVE_SECONDS = 120  # in which ranks that are told to stop may save, before they are killed


class _Loopback(StaticTCPRendezvous):
    """The rendezvous of one machine with itself: a new store on the loopback address for every attempt."""

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, params.run_id, 0)

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        listener = loopback_listener()
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))


def main(argv: Sequence[str] | None = None) -> int:
    """Start ranks with torchrun's options `argv`; return the exit status of the first rank that failed.

    A signal, SIGUSR1 too, is passed on to the ranks, which have two minutes to save. The status is then 0
    where all of them end with 0, else 128 and the signal's number, as in shells. 2: wrong options.
    """
    logging.getLogger(_ELASTIC).addFilter(_is_news)
    try:
        run(_read_options(list(argv or [])))
        work_is_saved()
    except SignalException as error:
        return 0 if _all_ended_well(error) else 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        to_stderr(f"fastmp launch: rank {rank} ended first, with status {failure.exitcode}")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (ValueError, AssertionError, RendezvousError) as error:  # torchrun asserts what its options are
        to_stderr(f"fastmp launch: {error}")
        return 1 if isinstance(error, RendezvousError) else 2
    return 0


_ELASTIC = "torch.distributed.elastic.multiprocessing.api"


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for torchrun's messages on the end of ranks, which `main` prints in one line."""
    text = str(record.msg)
    mistake = text.startswith("failed (exitcode") and "(exitcode: 2)" in record.getMessage()
    return not (mistake or text.startswith("Sending process"))


def _all_ended_well(error: SignalException) -> bool:
    """Return True if torchrun's agent saw all ranks of this machine exit with 0 after the signal."""
    for frame, _ in walk_tb(error.__traceback__):
        ranks = getattr(getattr(frame.f_locals.get("agent"), "_pcontext", None), "subprocess_handlers", {})
        if ranks:
            return all(rank.proc.returncode == 0 for rank in ranks.values())
    return False


def _read_options(argv: list[str]) -> Namespace:
    """Return torchrun's options, with fastmp's defaults unless `argv` or torchrun's variables (PET_*) set
    them.
    """
    parser = get_args_parser()
    parser.add_argument("-n", dest="nproc_per_node", metavar="N", default=SUPPRESS)
    if not Environment.read().ranks_per_machine:
        parser.set_defaults(nproc_per_node=None)
    if signals := parser.get_default("signals_to_handle"):  # not every torch asks
        parser.set_defaults(signals_to_handle=f"{signals},SIGUSR1")
    _check_options(parser, argv)
    args = parser.parse_args(argv)
    if args.training_script in PROGRAMS and not (args.module or args.no_python):
        args.training_script_args = [args.training_script, *args.training_script_args]
        args.module, args.training_script = True, "fastmp"
    if args.nproc_per_node is None:
        args.nproc_per_node = str(torch.cuda.device_count() or 1)
        if not torch.cuda.device_count():
            to_stderr("fastmp launch: no GPU found, starting 1 process; -n N starts N")
    kinds = ("auto", "cpu", "gpu", "xpu")
    if not args.nproc_per_node.isdecimal() and args.nproc_per_node not in kinds:
        raise ValueError(f"-n: expected a number of processes, or gpu, got {args.nproc_per_node!r}")
    ranks = determine_local_world_size(args.nproc_per_node)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    set_default_variables(OMP_NUM_THREADS=str(threads), TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(SAVE_SECONDS))
    options = ("rdzv_backend", "rdzv_endpoint", "node_rank", "master_addr", "master_port")
    if args.standalone or (
        args.nnodes in ("1", "1:1")
        and all(getattr(args, name) == parser.get_default(name) for name in options)
    ):
        _stay_on_this_machine(args)
    return args


def _check_options(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Raise ValueError for an unknown option before the program, or a program that does not exist."""
    known, at = parser._option_string_actions, 0
    kinds = {"module": False, "no_python": False}
    while at < len(argv) and argv[at].startswith("-"):
        name, equals, _ = argv[at].partition("=")
        found = [known[name]] if name in known else [a for o, a in known.items() if o.startswith(name)]
        if not found and argv[at][:2] in known and not name.startswith("--"):  # -n2
            found, equals = [known[argv[at][:2]]], "="
        if not found:
            close = difflib.get_close_matches(name, known, n=1)
            meant = "-n" if name.replace("_", "-") in _RANKS else close[0] if close else ""
            command = shlex.join(["fastmp", "launch", *argv[:at], meant, *argv[at + 1 :]])
            others = f"; did you mean: {command}" if meant and not equals else f"; did you mean {meant}?"
            raise ValueError(f"there is no option {name}{others if meant else ' (fastmp launch --help)'}")
        kinds[found[0].dest] = True
        at += 1 if equals or found[0].nargs == 0 else 2
    if at >= len(argv):
        raise ValueError("expected a program after the options, such as: fastmp launch -n 2 train FILE")
    program = argv[at]
    if kinds["module"] or kinds["no_python"] or program in PROGRAMS:
        return
    if Path(program).exists() and not program.endswith(".toml"):
        return
    close = difflib.get_close_matches(program, PROGRAMS, n=1)
    if program.endswith(".toml"):
        close = ["train", program]
    elif program == "finetune":
        close = ["-m", "examples.megatron_paper", program]
    command = shlex.join(["fastmp", "launch", *argv[:at], *close, *argv[at + 1 :]])
    meant = f"did you mean: {command}" if close else f"expected a script, or {', '.join(PROGRAMS)}"
    raise ValueError(f"there is no program {program!r}; {meant}")


def _stay_on_this_machine(args: Namespace) -> None:
    """Let the ranks meet, and gloo's connections be, on the loopback interface."""
    rendezvous_handler_registry.register("loopback", _Loopback)
    args.standalone, args.rdzv_backend = False, "loopback"
    args.rdzv_endpoint = LOOPBACK
    if "lo" in (name for _, name in socket.if_nameindex()):
        set_default_variables(GLOO_SOCKET_IFNAME="lo")
