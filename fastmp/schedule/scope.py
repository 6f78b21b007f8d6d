"""Resolve capture scopes to segments, and group layers into spans. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fastmp.config.dispatchers import capturable_dispatchers
from fastmp.schedule.stream_schedule import SegmentFacts

__all__ = ["captured_segments", "layer_groups", "must_run_eagerly", "span_kinds"]

# Scopes that name several segments; any other scope is the name of one segment.
_SCOPES = {
    "attn": ("attention",),
    "moe_router": ("router",),
    "moe_preprocess": ("preprocess", "shared_experts"),
    "moe": ("router", "preprocess", "shared_experts", "dispatch", "experts", "combine"),
}


_WHOLE = ("full", "full_step")


def captured_segments(
    scope: Sequence[str] | None, segments: Mapping[str, bool], overlapped: Collection[str] = ()
) -> set[str]:
    """Return the names of the segments to capture. segments: {name: True if it can be captured}.

    scope: attn, mlp, moe_router, moe_preprocess (with the shared experts), moe (everything in place of an
        MLP), full or full_step (everything), or segments by name. None captures all that can be, but no
        shared experts after an eager preprocess, which would be a graph of their own.
    overlapped: segments that run next to another microbatch's compute, outside of its graphs.

    ValueError for a scope that names no segment, for a part of which a segment cannot be captured, and for
    dispatch, experts or combine without the shared experts: where these are eager, they run on a stream that
    `combine` waits for, which a graph cannot do. Nor for shared experts between an eager preprocess and an
    eager dispatch: counts on their way to the host would be an input of their graph.
    """
    if scope is None:
        chosen = {name for name, capturable in segments.items() if capturable and name not in overlapped}
        return chosen - {"shared_experts"} if not segments.get("preprocess", True) else chosen
    parts = {name: segments if name in _WHOLE else _SCOPES.get(name, (name,)) for name in scope}
    found = {name: [part for part in own if part in segments] for name, own in parts.items()}
    if segments and not any(found.values()):
        groups = [name for name, own in _SCOPES.items() if any(part in segments for part in own)]
        raise ValueError(
            f"graphs: scope {list(scope)} names no segment; choose from {sorted({*segments, *groups})}"
        )
    for name, own in found.items():
        if outside := [part for part in own if part in overlapped]:
            raise ValueError(
                f"graphs: scope {name!r} has {', '.join(outside)}, which overlap_experts overlaps with the "
                "compute of another microbatch, outside of graphs; without a scope all else is captured"
            )
        eager = [part for part in own if not segments[part]]
        if eager:
            raise ValueError(
                f"graphs: scope {name!r} cannot be captured, because {must_run_eagerly(eager)}; "
                "without a scope everything else is captured"
            )
    chosen = {part for own in found.values() for part in own}
    exchange = [part for part in ("dispatch", "experts", "combine") if part in chosen]
    if exchange and "shared_experts" in segments and "shared_experts" not in chosen:
        raise ValueError(f"graphs: a scope with {', '.join(exchange)} needs 'shared_experts' as well; add it")
    if "shared_experts" in chosen and "preprocess" not in chosen and not segments["dispatch"]:
        raise ValueError("graphs: a scope with shared_experts needs 'preprocess' as well; add it")
    return chosen


def span_kinds(
    segments: Sequence[SegmentFacts], scope: Sequence[str] | None, *, overlap: bool = False
) -> list[tuple[bool, int]]:
    """Return (captured, layer group) of each segment of a chain: consecutive equal ones are one span.

    overlap: segments that exchange rows run next to another microbatch's compute, outside of its graphs.
    ValueError as `captured_segments`.
    """
    names = [each.name.rpartition(".")[2] for each in segments]
    eager = {name for name, each in zip(names, segments) if not each.capturable}
    apart = {name for name, each in zip(names, segments) if each.exchanges and overlap}
    chosen = captured_segments(scope, {name: name not in eager for name in names}, apart)
    if scope is None:  # a segment is captured even if its namesakes in other layers are eager, or exchange
        chosen |= {*names} - {"shared_experts"}
    captured = [
        each.capturable and name in chosen and not (each.exchanges and overlap)
        for name, each in zip(names, segments)
    ]
    return [(own, each.group if own else -1) for own, each in zip(captured, segments)]


def must_run_eagerly(segments: Sequence[str], reason: str = "") -> str:
    """Return the text of an error: `segments` must run eagerly, with the `reason` or an alternative."""
    said = f"{', '.join(segments)} must run eagerly"
    if reason:
        return f"{said} ({reason})"
    exchanges = "dispatch" in segments and "preprocess" not in segments
    return f"{said} (not with {capturable_dispatchers()})" if exchanges else said


def layer_groups(sizes: Sequence[int], span_size: int | None) -> list[int]:
    """Give each layer of a chain the number of its group; layers of two groups are never in one span.

    A graph is replayed as a whole: gradients of a span can be communicated only after its replay, and its
    parameters must have arrived before. So spans end where gradient buckets do, by the same rule.

    sizes: the parameters of each layer. span_size: parameters after which a group is full, counted from the
        last layer; None: all layers are in one group.
    """
    numbers, number, held = [], 0, 0
    for size in reversed(sizes):
        numbers.append(number)
        held += size
        if span_size is not None and held >= span_size:
            number, held = number + 1, 0
    return numbers[::-1]
