"""What the parent does once so that its forked ranks need not do it again."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def warm_compiler():
    """The 600 modules a first torch.compile imports: seconds, which every forked rank would spend anew."""
    compiled = torch.compile(lambda x: x.sin(), fullgraph=True, backend="aot_eager")
    compiled(torch.ones(1, requires_grad=True)).sum().backward()
