"""`fastmp plan`: what a layout means, before a single process starts. Never imports torch.

fastmp plan groups --world-size 16 --tp 4                           which ranks form which groups
fastmp plan graphs configs/llama-3-8b.toml --world-size 16         which CUDA graphs a rank would have
fastmp plan recipe configs/mixtral-8x7b.toml --world-size 64        what a rank of a recipe would hold
fastmp plan schedule --pp 4 --vpp 2 --num-microbatches 8            what pipeline ranks do in which order
"""

from __future__ import annotations

import sys

from fastmp.plan import graphs, groups, recipe, schedule

_COMMANDS = {
    "graphs": graphs.main,
    "groups": groups.main,
    "recipe": recipe.main,
    "schedule": schedule.main,
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands above, the first one where none is named; 0, or 2 where something is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]](arguments[1:])
    return groups.main(arguments)
