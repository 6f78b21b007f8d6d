"""`fastmp doctor`: print versions, devices and the implementation of each op, and check the ops' accuracy.

Nothing is probed that a user could not see: versions, devices, the record that the build left behind.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fastmp
from fastmp.config.command_line import Parser

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "matplotlib", "transformer-engine")


def _versions() -> list[str]:
    from fastmp.ops.core.versions import TESTED, untested

    lines = [
        f"fastmp {fastmp.__version__} in {Path(fastmp.__file__).parent}",
        f"python {platform.python_version()}",
    ]
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
            if name in TESTED and (warning := untested(name, version(name))):
                lines.append(f"  {warning}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    return lines


def _build(record: dict[str, Any]) -> list[str]:
    """Return lines with what was built, and whether parts on torch's C++ interface serve this torch."""
    from fastmp.cuda_graphs.replay_program import REPLAY_ABSENT
    from fastmp.ops.core.backends import AUTOGRAD_ABSENT

    texts = {key: " ".join(value) if isinstance(value, list) else value for key, value in record.items()}
    for part, absent in (("autograd", AUTOGRAD_ABSENT), ("replay", REPLAY_ABSENT)):
        if texts.get(part) == "built":
            texts[part] += f", not used: {absent}; Python serves" if absent else ", serves this torch"
    return [f"{key}: {text}" for key, text in texts.items() if text] or ["nothing was compiled"]


def connections(value: str, major: int) -> str:
    """Return the advice on CUDA_DEVICE_MAX_CONNECTIONS ("": not set) for a GPU of compute capability `major`.

    With one hardware queue, kernels of all streams start in the order of their launches: a collective before
    the GEMM that hides it. GPUs up to Hopper need that.
    """
    found = f"CUDA_DEVICE_MAX_CONNECTIONS is {value or 'not set'}"
    if major >= 10:
        advice = (
            "unset it: on this GPU it only makes streams wait for each other"
            if value == "1"
            else "right for this GPU"
        )
    elif value == "1":
        advice = "right for tensor parallelism; unset it if expert parallelism or FSDP2 overlap"
    else:
        advice = "set it to 1 for tensor parallelism, to launch collectives before the GEMMs that hide them"
    return f"{found}: {advice}"


def _devices(archs: Sequence[str]) -> list[str]:
    import torch

    from fastmp.config import Environment
    from fastmp.ops.core.built import supports

    lines = [f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"]
    if not torch.cuda.is_available():
        return [*lines, "cuda: no device" if torch.version.cuda else "cuda: this torch is built without CUDA"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory >> 30} GiB")
        if archs and not supports(archs, (gpu.major, gpu.minor)):
            lines.append(f"  the compiled kernels ({' '.join(archs)}) do not run on it; Triton serves")
            lines.append(f"  rebuild with TORCH_CUDA_ARCH_LIST={gpu.major}.{gpu.minor} to compare them")
    lines.append(connections(Environment.read().connections, torch.cuda.get_device_capability()[0]))
    return lines


# Rows of each expert of a rank, and N x K of their weights: the first products of some models.
_GROUPED = {
    "Mixtral 8x7B": ([2048] * 8, 28672, 4096),
    "DeepSeek-V3": ([8192] * 4, 4096, 7168),
    "Qwen3 30B-A3B": ([256] * 128, 1536, 2048),
}


def _grouped() -> list[str]:
    """Return lines with the grouped-GEMM implementation of known model sizes on each architecture."""
    import torch

    from fastmp.ops import grouped_mm_choice

    archs = {"cpu": 0, "sm_80": 80, "sm_90": 90, "sm_100": 100}
    lines = []
    for name, (sizes, n, k) in _GROUPED.items():
        said = (
            f"{arch} {grouped_mm_choice(sizes, n, k, torch.bfloat16, number)}"
            for arch, number in archs.items()
        )
        shape = f"{name}, {len(sizes)} experts of {sizes[0]} rows, {n} x {k}, bfloat16"
        lines.append(f"{shape}: {', '.join(said)}")
    return lines


_FLASH_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}  # where torch looks for them


def _attention() -> list[str]:
    """Return lines with the attention backend of sample calls on each device, and other backends."""
    import torch

    from fastmp.ops.attention import active_flash, choose, describe

    calls: dict[str, tuple[int, dict[str, bool]]] = {
        "causal": (4096, {}),
        "last 1024 of 4096": (1024, {}),
        "window": (4096, {"window": True}),
        "documents": (4096, {"documents": True}),
        "dropout, last 1024 of 4096": (1024, {"dropout": True}),
        "sinks": (4096, {"sinks": True}),
    }
    devices = {"cpu": torch.float32}
    devices |= {f"cuda:{index}": torch.bfloat16 for index in range(torch.cuda.device_count())}
    lines = []
    for device, dtype in devices.items():
        keys = torch.empty(1, 1, 1, 128, device=device, dtype=dtype).expand(1, 8, 4096, 128)
        for name, (queries, asked) in calls.items():
            backend, reason = choose(describe(keys[:, :, :queries], keys, keys, **asked))
            lines.append(f"{device} {name}: {backend} ({reason})")
        latent = torch.empty(1, 1, 1, 192, device=device, dtype=dtype).expand(1, 8, 4096, 192)
        backend, reason = choose(describe(latent, latent, keys))
        lines.append(f"{device} latent, keys of 192 and values of 128: {backend} ({reason})")
    lines.append(f"flash attention is {active_flash()}")
    for name, module in _FLASH_MODULES.items():
        package = module.partition(".")[0]
        if find_spec(package) and find_spec(module) and name != active_flash():
            call = f'torch.nn.attention.activate_flash_attention_impl("{name}")'
            lines.append(f"{name} is installed; {call} puts it in that place")
    return lines


def _serving(table: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return lines that group ops by (implementation, reason).

    The implementation that serves most of them comes first and without their names.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, served in table.items():
        groups.setdefault(served, []).append(name)
    most, *others = sorted(groups, key=lambda served: -len(groups[served]))
    lines = [f"all {len(table)} ops: {most[0]} ({most[1]})" + (", except" if others else "")]
    return lines + [f"  {who} ({why}): {', '.join(sorted(groups[who, why]))}" for who, why in others]


def _check(device: str) -> tuple[list[str], bool]:
    from fastmp.ops.core.registry import OPS
    from fastmp.testing.ops import check_op

    lines, good = [], True
    for name in OPS:
        for result in check_op(name, device):
            good &= result.ok
            verdict = "ok" if result.ok else "WRONG"
            figures = f"error {result.error:.1e}, bound {result.bound:.1e}"
            lines.append(f"{device} {name} {result.dtype}: {verdict} ({figures})")
    return lines, good


def _print(title: str, lines: Sequence[str]) -> None:
    print(title)
    for line in lines:
        print(f"  {line}")


def main(argv: list[str] | None = None) -> int:
    """Print the report; with --check run every op against float64 on every device and exit 1 on an error."""
    parser = Parser(
        prog="fastmp doctor",
        description="Print versions, devices and the implementation of each op; with "
        "--check, also test the accuracy of the ops on this machine (status 1 if one is wrong)."
        "\n\n  fastmp doctor --check",
    )
    parser.add_argument("--check", action="store_true", help="compare every op with a float64 reference")
    options = parser.parse_args(argv)

    import torch

    from fastmp.ops import backends
    from fastmp.ops.core.built import build_record

    build = build_record()
    _print("versions", _versions())
    _print("build", _build(build))
    _print("devices", _devices(build.get("archs", [])))
    for device in ("cpu", "cuda"):
        _print(f"ops on {device}", _serving({name: served[device] for name, served in backends().items()}))
    _print("grouped GEMMs of experts: one launch (grouped) or one GEMM after another (loop)", _grouped())
    _print("attention", _attention())
    if not options.check:
        return 0
    good = True
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        lines, right = _check(device)
        _print(f"check on {device} against float64", lines)
        good &= right
    return 0 if good else 1
