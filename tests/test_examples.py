"""Examples of docstrings run: every `Example:` block in fastmp, all in one process, on a CPU.

Write an example as an indented block after a line `Example:`, as code or with doctest's `>>>` and output. It
sees `torch`, `fastmp`, the names of its module, and a small `model` with its input `x` and its `loss`. A
block after `Example (REASON):`, such as "needs several ranks", is not run.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastmp

ROOT = Path(fastmp.__file__).parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BLOCK = re.compile(r"^[ ]*Example:\n((?:\n|[ ]+.*\n?)+)", re.MULTILINE)

RUN = """
import doctest, importlib, json, os, sys, tempfile, traceback
import torch
import fastmp, fastmp.ops
examples = json.load(sys.stdin)
os.chdir(tempfile.mkdtemp())
for name, module, code in examples:
    scope = {"torch": torch, "fastmp": fastmp, **vars(importlib.import_module(module))}
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    scope |= {"__name__": "__main__", "model": model, "x": x, "loss": model(x).sum()}
    try:
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, scope, name, None, 0)
            doctest.DebugRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test)
        else:
            exec(compile(code, name, "exec"), scope)
    except BaseException as error:
        got = f" got {error.got!r}" if hasattr(error, "got") else ""
        print(f"--- {name}\\n{code}\\n{traceback.format_exc()}{got}")
"""


def examples() -> Iterator[tuple[str, str, str]]:
    """Yield (file:line and name, module, code) of every example."""
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, DOCUMENTED):
                continue
            for code in BLOCK.findall((ast.get_docstring(node) or "") + "\n"):
                name = f"{path.relative_to(ROOT.parent)}:{getattr(node, 'lineno', 1)}"
                yield f"{name} {getattr(node, 'name', module)}", module, textwrap.dedent(code)


def test_examples_of_docstrings_run():
    found = list(examples())
    assert found, "no docstring has an example"
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failures = done.stdout.split("--- ")[1:]
    if failures:
        pytest.fail(f"{len(failures)} of {len(found)} examples fail:\n" + "\n".join(failures), pytrace=False)
