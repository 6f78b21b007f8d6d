"""ATEN_CPU_CAPABILITY limits the C++ kernels as it limits torch's own, so that tests reach all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fastmp.ops import OPS

BEST = torch.backends.cpu.get_cpu_capability()
CAPABILITIES = ["default", *["avx2"] * (BEST in ("AVX2", "AVX512")), *["avx512"] * (BEST == "AVX512")]

# how the squares of a row are added up depends on the lanes of a vector
PROGRAM = """if True:
    import torch, fastmp.ops
    x = torch.randn(64, 4099, generator=torch.Generator().manual_seed(0))
    _, _, stats = torch.ops.fastmp.rms_norm(x, None, torch.ones(4099), 1e-6)
    print(stats.numpy().tobytes().hex())
"""


@pytest.mark.full
@pytest.mark.skipif(OPS["rms_norm"].serving["cpu"] != "c++", reason="no compiled kernels")
def test_each_capability_has_kernels_of_its_own():
    printed = {}
    for capability in CAPABILITIES:
        variables = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        printed[capability] = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True
        ).stdout
    assert len(set(printed.values())) == len(CAPABILITIES)
    rows = [torch.frombuffer(bytearray.fromhex(line), dtype=torch.float32) for line in printed.values()]
    for row in rows:
        torch.testing.assert_close(row, rows[0])
