"""Versions of torch and Triton with which the whole test suite passes."""

from __future__ import annotations

TESTED = {"torch": ((2, 10), (2, 15)), "triton": ((3, 6), (3, 9))}  # oldest and newest, inclusive


def untested(package: str, version: str | None) -> str:
    """Return a warning if `version` of "torch" or "triton" lies outside `TESTED`, else "".

    Only the first two numbers of the version count. None: the package is not installed.
    """
    if version is None:
        return ""
    oldest, newest = TESTED[package]
    major, minor = version.split(".")[:2]
    if oldest <= (int(major), int(minor)) <= newest:
        return ""
    span = " to ".join(".".join(map(str, bound)) for bound in (oldest, newest))
    return (
        f"fastmp is tested with {package} {span}, but this is {package} {version}:"
        " run `fastmp doctor --check` to compare every op with float64"
    )
