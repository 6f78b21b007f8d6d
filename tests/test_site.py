"""The site is built as mkdocs.yml says, without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import NAV

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.exhaustive
def test_the_site_is_built_without_a_warning(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs and mkdocstrings[python] are not installed (the extra `docs`)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in NAV:
        assert (tmp_path / name).with_suffix(".html").is_file(), name
    assert "fastmp.ops.bias_gelu" in (tmp_path / "api" / "fastmp.ops.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
