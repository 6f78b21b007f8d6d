"""Token files for the tests that run `fastmp train`."""

from __future__ import annotations

import pytest

from fastmp.train.data.corpus import build


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A small directory of token files: 256 bytes and end-of-text."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    return build([str(text)], folder / "tokens")
