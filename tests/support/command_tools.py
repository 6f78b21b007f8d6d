"""Shared by the tests of commands: exit status, mistakes, a terminal, and a child process."""

from __future__ import annotations

import io
import os

from fastmp.apps.cli import main


class Terminal(io.StringIO):
    def isatty(self):
        return True


def status_of(line, program=main):
    """Return the exit status of `fastmp LINE`, or of another program, whether it returns or exits."""
    try:
        return program(line)
    except SystemExit as left:
        return left.code


def check_mistake(line, named, capsys, program=main, prog="fastmp"):
    """Check that `fastmp LINE` ends with status 2 and one line on stderr that contains `named`."""
    status, said = status_of(line, program), capsys.readouterr()
    assert status == 2 and not said.out
    assert named in said.err and len(said.err.splitlines()) == 1
    assert said.err.startswith((f"{prog} {line[0]}: ", f"{prog} {' '.join(line[:2])}: "))


def fork(action):
    """Run `action` in a child, which ends with status 0, or 1 if it raises; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid
