"""Text for people: a line that cannot be written is lost, and nothing else; lost output is an error."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastmp.config.console import Console, printable
from fastmp.training.metrics import Display

ROOT = Path(__file__).parents[2]
PLAN = "plan groups --world-size 8 --tp 2"


def shell(line, **variables):
    """Run a line of bash, in which `fastmp` is the command; return it when done."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    line = f'set -o pipefail; fastmp() {{ "{sys.executable}" -m fastmp "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", line], env=environment, cwd=ROOT, capture_output=True, text=True)


def show_lines(stream, first="some words"):
    """Print as a program does that trains, to `stream`, in a process that then ends as any other."""
    program = (
        "import sys; from fastmp.config.console import *; from fastmp.training.metrics import Display\n"
        f"log = Display(sys.{stream}, lambda: 0.0)\n"
        f"log.line({first!r}); to_stdout('more'); to_stderr('more'); log.progress('x'); log.close()"
    )
    return f"'{sys.executable}' -c \"$PROGRAM\"", {"PROGRAM": program}


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", ">/dev/full 2>&1"])
def test_lines_that_cannot_be_written_change_no_status(closed):
    command, variables = show_lines("stderr" if closed == "2>&-" else "stdout")
    done = shell(f"{command} {closed}", **variables)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_a_full_disk_is_told_once():
    command, variables = show_lines("stdout")
    done = shell(f"{command} > /dev/full", **variables)
    told = "fastmp: the log cannot be written (No space left on device); the work continues without it"
    assert done.stderr.splitlines() == [told, "more"]


def test_letters_that_the_locale_lacks_are_escaped():
    command, variables = show_lines("stdout", "grüße 語")
    done = shell(command, **variables, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout == "gr\\xfc\\xdfe \\u8a9e\nmore\n"


def test_what_controls_a_terminal_is_escaped_and_other_text_is_not():
    assert printable("a\x1b[31m\r\x00\x9b\u202e\udc80") == r"a\x1b[31m\r\x00\x9b\u202e\udc80"
    plain = "tab\t, newline\n, Grüße, 日本語\u3000, \N{FAMILY}"
    assert printable(plain) == plain
    stream = io.StringIO()
    Console(stream).write("\x1b[2J", start="\r\x1b[K")
    assert stream.getvalue() == "\r\x1b[K\\x1b[2J\n"


def test_a_log_line_of_foreign_text_cannot_move_the_cursor():
    stream = io.StringIO()
    Display(stream, lambda: 0.0).line("tokens/\x1b[2J", "\udcff")
    assert stream.getvalue() == "tokens/\\x1b[2J  \\udcff\n"


def test_a_stream_closed_by_the_program_is_no_error():
    stream = io.StringIO()
    stream.close()
    console = Console(stream)
    assert not console.is_terminal
    console.write("lost")


# The output that a command is run for.


@pytest.mark.parametrize(
    ("redirected", "reason"),
    [(">/dev/full", "[Errno 28] No space left on device"), (">&-", "[Errno 9] Bad file descriptor")],
)
@pytest.mark.parametrize("command", ["--version", "plan groups --help", PLAN, f"{PLAN} --json"])
def test_output_that_cannot_be_written_is_an_error(command, redirected, reason):
    done = shell(f"fastmp {command} {redirected}")
    assert (done.returncode, done.stderr) == (1, f"fastmp: {reason}\n")


def test_output_that_cannot_be_written_is_an_error_without_stderr_too():
    assert shell(f"fastmp {PLAN} >/dev/full 2>&1").returncode == 1
    assert shell(f"fastmp {PLAN} >&- 2>&-").returncode == 1


def test_closed_streams_leave_their_descriptors_to_no_file(tmp_path):
    program = "import os, sys; from fastmp.apps import cli; cli.main(['--version']); " + (
        f"fd = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY); os._exit(fd)"
    )
    done = shell(f"'{sys.executable}' -c \"$PROGRAM\" <&- >&- 2>&-", PROGRAM=program)
    assert done.returncode == 3
