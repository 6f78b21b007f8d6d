"""Lengths of time as Slurm writes them. Standard library only."""

from __future__ import annotations

import re

__all__ = ["duration_seconds"]

_FORMS = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|(\d+))")


def duration_seconds(text: str) -> int:
    """Return the seconds of a length of time in one of the forms of Slurm's `--time`.

    These are "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes" and
    "days-hours:minutes:seconds" (https://slurm.schedmd.com/sbatch.html). ValueError for anything else.
    """
    found = _FORMS.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"a length of time must be minutes, minutes:seconds, hours:minutes:seconds or "
            f"days-hours[:minutes[:seconds]], got {text!r}"
        )
    days, of_days, *rest, alone = (int(number or 0) for number in found.groups())
    minutes_of_days, seconds_of_days, hours, minutes, seconds = rest
    minutes += minutes_of_days + alone
    return ((days * 24 + of_days + hours) * 60 + minutes) * 60 + seconds_of_days + seconds
