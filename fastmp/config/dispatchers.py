"""Token dispatchers by their facts: segments that a graph can hold, traffic, saved bytes and states.

`DISPATCHERS` are the choices of `moe.dispatcher`, for experts on several expert-parallel ranks. `LOCAL` and
`SHARING` serve ranks that hold all experts or a slice of each; `select_dispatcher` decides. The classes are
in `fastmp.nn.moe.dispatchers`, one module each. A dispatcher from outside is one module with its class, its
`DispatcherSpec` and a call of `DISPATCHERS.register`. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastmp.config.precision import row_bytes
from fastmp.config.specs import Registry

__all__ = [
    "DISPATCHERS",
    "DROPLESS",
    "STASH_STATE",
    "STASH_TICKETS",
    "DispatchSizes",
    "DispatcherSpec",
    "TensorFact",
    "RingTransfer",
    "capturable_dispatchers",
    "row_capacity",
    "select_dispatcher",
]

# Multiprocessors that a collective of NCCL holds: 16 or more where no switch adds
# (developer.nvidia.com/blog/enabling-fast-inference-and-resilient-training-with-nccl-2-27).
NCCL_MULTIPROCESSORS = 16
_INDEX, _PROBABILITY, _DEEPEP_INDEX = 4, 4, 8  # bytes
_MAX_ROWS = 1 << 31  # rows of symmetric memory are numbered in int32
STASH_TICKETS = 4096  # forwards of experts in flight on a rank, each with an entry of the activation stash
STASH_STATE = 8 + 3 * STASH_TICKETS  # int64 numbers: of the ring, and of each entry


@dataclass(frozen=True)
class DispatchSizes:
    """The sizes of an expert layer and microbatch on one rank; all experts get equally many tokens.

    tokens: of this rank. pairs: (token, expert) assignments that a capacity factor leaves. fp8: the experts
    multiply in FP8, for which tokens may be sent quantised.
    """

    tokens: int
    pairs: int
    hidden_size: int
    itemsize: int
    top_k: int
    num_experts: int
    ep: int
    etp: int
    symmetric_capacity: float | None = None
    fp8: bool = False
    num_groups: int = 1
    group_topk: int = 1

    @property
    def sent_row(self) -> int:
        """Bytes of a token's hidden state as it is sent to experts: in FP8 with scales, or as it is."""
        return row_bytes(self.hidden_size) if self.fp8 else self.row

    @property
    def row(self) -> int:
        """Bytes of a token's hidden state."""
        return self.hidden_size * self.itemsize

    @property
    def choices(self) -> int:
        """(Token, expert) assignments of this rank before anything is dropped."""
        return self.tokens * self.top_k

    @property
    def ranks(self) -> int:
        """Ranks of the etp-ep group."""
        return self.etp * self.ep

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return self.num_experts // self.ep

    @property
    def reached(self) -> float:
        """Ranks that a token is sent to, in the mean."""
        return self.etp * self.parts_reached(self.ep)

    def parts_reached(self, parts: int) -> float:
        """Return the number of parts that hold a token's experts, of `parts` equal ones, such as nodes.

        It is the mean over all choices of `group_topk` groups, and of `top_k` of their experts. A part is
        whole groups, or a share of one.
        """
        group, part = self.num_experts // self.num_groups, self.num_experts // parts
        groups, experts = max(1, part // group), min(group, part)  # of a part; of it in each of its groups
        open_experts, missed = self.group_topk * group, 0.0
        for opened in range(min(groups, self.group_topk) + 1):  # groups of the part that a token chooses from
            ways = math.comb(groups, opened) * math.comb(self.num_groups - groups, self.group_topk - opened)
            missed += ways * math.comb(open_experts - opened * experts, self.top_k)
        ways = math.comb(self.num_groups, self.group_topk) * math.comb(open_experts, self.top_k)
        return parts * (1.0 - missed / ways)

    def group_size(self, group: str) -> int:
        """Return the ranks of the group "ep", "etp" or "etp-ep"."""
        return {"ep": self.ep, "etp": self.etp, "etp-ep": self.ranks}[group]


class RingTransfer(NamedTuple):
    """A collective of the forward, counted as a ring; `nbytes` is the larger side.

    gradient: the backward sends as many bytes, or `backward` if that is another number. kept: autograd keeps
    tensors after it, so that recomputation repeats it.
    """

    group: str
    nbytes: float
    gradient: bool = True
    kept: bool = True
    backward: float | None = None


class TensorFact(NamedTuple):
    """A tensor that crosses from one segment to the next. grad: it has a gradient."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False


Tensors = dict[str, TensorFact | None]  # by name, in order; None: the earlier tensor of that name, unchanged
PASSED: None = None


def _pairs_of_group(sizes: DispatchSizes) -> int:
    return sizes.pairs * sizes.etp


def _pairs_crossing(sizes: DispatchSizes, inside: int) -> float:
    """Return the share of pairs for other servers in what a rank sends to other ranks of the ep group."""
    return (sizes.ep - inside) / (sizes.ep - 1)


def _no_problems(sizes: DispatchSizes) -> Iterator[tuple[tuple[str, ...], str]]:
    return iter(())


@dataclass(frozen=True)
class DispatcherSpec:
    """The facts of a token dispatcher; callables take the `DispatchSizes` of a rank.

    make: called as make(moe, groups), with the `MoEConfig` and `ParallelGroups`; returns the dispatcher.
    traffic: what the forward sends.
    exchange_group: the group of `traffic` in which each rank sends each other one rows of its own, as in an
        all-to-all; other groups are rings.
    crossing: called with the number of ranks that this group has in a server; returns the share of the
        bytes sent that pass the network.
    saved_bytes: what autograd keeps of dispatch and combine, beyond the rows at the experts.
    prepared: the tensors that `preprocess` returns, by the names of its `DispatchState`; "indices" and
        "probs" are there before.
    dispatched: the tensors that `dispatch` returns: "rows", "offsets", and its `DispatchState`. None where
        no graph can hold the segment.
    eager: the segments that no graph can hold, because their shapes depend on other ranks or on data.
    exchanges: the segments that communicate, and can overlap another microbatch's compute.
    multiprocessors: of a GPU, held by an exchange; compute that overlaps it has the others. Kernels on
        symmetric memory are assumed to hold as many as NCCL's.
    host_syncs: True if the host waits for the device in `dispatch`.
    gathers_tokens: True if each rank receives the tokens of all others, whatever experts they chose.
    host_counts_tokens: True if counts that the host reads are tokens of a rank, False if rows of an expert.
    rows: the rows that the experts of a rank compute.
    symmetric_memory: True if these rows lie in symmetric memory, reserved for `rows`; such a dispatcher
        takes `moe.symmetric_capacity`.
    problems: yields (fields, message) for sizes that do not fit, for the layout check.
    requires: a phrase for error messages that recommend the dispatcher.
    """

    name: str
    make: str | Callable[..., Any]
    traffic: Callable[[DispatchSizes], tuple[RingTransfer, ...]]
    saved_bytes: Callable[[DispatchSizes], int]
    prepared: Callable[[DispatchSizes], Tensors]
    dispatched: Callable[[DispatchSizes], Tensors] | None = None
    exchange_group: str = "ep"
    crossing: Callable[[DispatchSizes, int], float] = _pairs_crossing
    eager: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ("dispatch", "combine")
    multiprocessors: int = NCCL_MULTIPROCESSORS
    host_syncs: bool = False
    gathers_tokens: bool = False
    host_counts_tokens: bool = False
    rows: Callable[[DispatchSizes], int] = _pairs_of_group
    symmetric_memory: bool = False
    problems: Callable[[DispatchSizes], Iterator[tuple[tuple[str, ...], str]]] = _no_problems
    help: str = ""
    requires: str = ""

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can hold every segment."""
        return not self.eager


# One rank that holds all experts: tokens are only sorted, and every shape is static.


def _sorted_saved(ranks: float, sizes: DispatchSizes) -> int:
    """Return the bytes of places and probabilities of the choices of `ranks` ranks, and of the outputs."""
    return round(ranks * sizes.choices) * (_INDEX + _PROBABILITY) + sizes.pairs * sizes.etp * sizes.row


def _local_prepared(sizes: DispatchSizes, ranks: int = 1) -> Tensors:
    return {
        "probs": PASSED,
        "row_of": TensorFact((ranks * sizes.tokens, sizes.top_k), "int32"),
        "offsets": TensorFact((sizes.num_experts,), "int32"),
    }


def _rows_fact(rows: int, sizes: DispatchSizes) -> TensorFact:
    dtype = "float32" if sizes.itemsize == 4 else "bfloat16"
    return TensorFact((rows, sizes.hidden_size), dtype, grad=True)


LOCAL = DispatcherSpec(
    "local",
    "fastmp.nn.moe.dispatchers.local:LocalDispatcher.create",
    traffic=lambda sizes: (),
    saved_bytes=lambda sizes: _sorted_saved(1, sizes),
    prepared=_local_prepared,
    dispatched=lambda sizes: {
        "rows": _rows_fact(sizes.choices, sizes),
        "offsets": PASSED,
        "probs": PASSED,
        "row_of": PASSED,
    },
    exchanges=(),
)


# Expert tensor parallelism without expert parallelism: the ranks of an etp group gather all their tokens.


def _gather_traffic(group: str, sizes: DispatchSizes) -> tuple[RingTransfer, ...]:
    """Return what gathering tokens, probabilities and choices sends, with a reduce-scatter of the outputs."""
    tokens = float(sizes.tokens * sizes.ranks)
    return (
        RingTransfer(group, tokens * sizes.row),
        RingTransfer(group, tokens * sizes.row, kept=False),
        RingTransfer(group, tokens * sizes.top_k * _PROBABILITY),
        RingTransfer(group, tokens * sizes.top_k * _INDEX, gradient=False),
    )


def _sharing_dispatched(sizes: DispatchSizes) -> Tensors:
    return {
        "rows": _rows_fact(sizes.etp * sizes.choices, sizes),
        "offsets": PASSED,
        "probs": TensorFact((sizes.etp * sizes.tokens, sizes.top_k), "float32", grad=True),
        "row_of": PASSED,
    }


SHARING = DispatcherSpec(
    "sharing",
    "fastmp.nn.moe.dispatchers.sharing:SharingDispatcher.create",
    traffic=lambda sizes: _gather_traffic("etp", sizes),
    saved_bytes=lambda sizes: _sorted_saved(sizes.etp, sizes),
    prepared=lambda sizes: _local_prepared(sizes, sizes.etp),
    dispatched=_sharing_dispatched,
    gathers_tokens=True,
)
# The ranks hold different sequences, and their hosts tell each other how many tokens they have.
SHARING_SEQUENCES = replace(
    SHARING,
    name="sharing_sequences",
    dispatched=None,
    eager=("preprocess", "dispatch", "experts", "combine"),
)


# Expert parallelism.

_BACK = ("dispatch", "experts", "combine")


def _counts(sizes: DispatchSizes) -> TensorFact:
    """Return the host copy of all ranks' counts (R, E + 1)."""
    return TensorFact((sizes.ranks, sizes.num_experts + 1), "int32")


def _alltoall_prepared(sizes: DispatchSizes) -> Tensors:
    blocks = TensorFact((sizes.etp * (sizes.num_experts + 1),), "int32")
    arriving = sizes.ranks * sizes.tokens * min(sizes.top_k, sizes.num_local)
    return {
        "probs": PASSED,
        "row_of": TensorFact((sizes.tokens, sizes.top_k), "int32"),
        "row_of_received": TensorFact((arriving, 1), "int32"),
        "starts": blocks,
        "places": blocks,
        "offsets": TensorFact((sizes.num_local,), "int32"),
        "counts": _counts(sizes),
    }


ALLTOALL = DispatcherSpec(
    "alltoall",
    "fastmp.nn.moe.dispatchers.alltoall:AllToAllDispatcher.create",
    traffic=lambda sizes: (
        RingTransfer("ep", sizes.pairs * sizes.sent_row, backward=sizes.pairs * sizes.row),
        RingTransfer("ep", sizes.pairs * sizes.row),
        *2 * (RingTransfer("etp", sizes.pairs * sizes.row * sizes.etp),),
    ),
    # both sides sort rows; the senders weight the results
    saved_bytes=lambda sizes: (
        sizes.pairs * sizes.etp * _INDEX + sizes.choices * (_INDEX + _PROBABILITY) + sizes.pairs * sizes.row
    ),
    prepared=_alltoall_prepared,
    eager=_BACK,
    host_syncs=True,
    help="an all-to-all of tokens",
)

ALLGATHER = DispatcherSpec(
    "allgather",
    "fastmp.nn.moe.dispatchers.allgather:AllGatherDispatcher.create",
    traffic=lambda sizes: _gather_traffic("etp-ep", sizes),
    saved_bytes=lambda sizes: _sorted_saved(sizes.ranks, sizes),
    prepared=lambda sizes: {"indices": PASSED, "probs": PASSED, "counts": _counts(sizes)},
    eager=_BACK,
    host_syncs=True,
    gathers_tokens=True,
    host_counts_tokens=True,
    help="every rank of the expert group gathers all tokens: for few experts a rank and many a token",
)


def row_capacity(
    tokens: int, *, top_k: int, experts: int, ep: int, etp: int, factor: float | None = None
) -> int:
    """Return the row capacity of a rank's buffer when each of ep x etp ranks dispatches `tokens`.

    Args:
        tokens: tokens of one rank.
        factor: capacity factor over a balanced load, at most the worst case. None: the worst case, every
            token routed to the experts of one rank.

    Example:
        >>> row_capacity(8, top_k=2, experts=4, ep=2, etp=1)
        32
        >>> row_capacity(8, top_k=2, experts=4, ep=2, etp=1, factor=1.5)
        24
    """
    most = max(ep * etp * tokens * min(top_k, experts // ep), 1)
    return most if factor is None else min(most, max(math.ceil(factor * tokens * top_k * etp), 1))


def _symmetric_rows(sizes: DispatchSizes) -> int:
    return row_capacity(
        sizes.tokens,
        top_k=sizes.top_k,
        experts=sizes.num_experts,
        ep=sizes.ep,
        etp=sizes.etp,
        factor=sizes.symmetric_capacity,
    )


def _symmetric_dispatched(sizes: DispatchSizes) -> Tensors:
    return {
        "rows": _rows_fact(_symmetric_rows(sizes), sizes),
        "offsets": TensorFact((sizes.num_local,), "int32"),
        "probs": PASSED,
        "where": TensorFact((sizes.tokens, sizes.top_k), "int32"),
        "ends": TensorFact((sizes.num_local + 1,), "int32"),
    }


def _symmetric_problems(sizes: DispatchSizes) -> Iterator[tuple[tuple[str, ...], str]]:
    if sizes.num_experts % sizes.ep == 0 and sizes.ep * (rows := _symmetric_rows(sizes)) >= _MAX_ROWS:
        yield (
            ("model.moe.symmetric_capacity", "data.micro_batch_size"),
            f"{sizes.ep} ranks with room for {rows} rows each are too many rows for int32, by which "
            "dispatcher 'symmetric' numbers them",
        )


SYMMETRIC = DispatcherSpec(
    "symmetric",
    "fastmp.nn.moe.dispatchers.symmetric:SymmetricDispatcher.create",
    # stores to other ranks' memory, and loads from it
    traffic=lambda sizes: (
        RingTransfer(
            "etp-ep",
            sizes.pairs * sizes.etp * sizes.sent_row,
            backward=sizes.pairs * sizes.etp * sizes.row,
        ),
        RingTransfer("etp-ep", sizes.pairs * sizes.etp * sizes.row),
    ),
    # rows come back unsorted, and are weighted where they arrive
    saved_bytes=lambda sizes: sizes.choices * (_INDEX + _PROBABILITY + sizes.row),
    prepared=lambda sizes: {
        "probs": PASSED,
        "indices": PASSED,
        "row_of": TensorFact((sizes.tokens, sizes.top_k), "int32"),
        "ends": TensorFact((sizes.num_experts,), "int32"),
    },
    dispatched=_symmetric_dispatched,
    rows=_symmetric_rows,
    symmetric_memory=True,
    problems=_symmetric_problems,
    help="put and get through symmetric memory of the ranks of one machine, without host synchronisation",
    requires="for ranks of one machine",
)


def _deepep_traffic(sizes: DispatchSizes) -> tuple[RingTransfer, ...]:
    """Return the transfers of DeepEP: a token goes once to each rank it reaches, with all its choices."""
    tokens, choices = sizes.tokens * sizes.reached, sizes.top_k * sizes.etp
    return (
        RingTransfer("etp-ep", tokens * sizes.row),
        RingTransfer("etp-ep", tokens * sizes.row),
        RingTransfer("etp-ep", tokens * choices * _PROBABILITY),
        RingTransfer("etp-ep", tokens * choices * _DEEPEP_INDEX, gradient=False),
    )


def _deepep_crossing(sizes: DispatchSizes, inside: int) -> float:
    """Return the share of bytes that pass the network: a token goes once to each node, then over NVLink."""
    nodes = sizes.ranks // inside
    away = sizes.parts_reached(nodes) * (1.0 - 1.0 / nodes)
    return away / (sizes.reached * (1.0 - 1.0 / sizes.ranks))


DEEPEP = DispatcherSpec(
    "deepep",
    "fastmp.nn.moe.dispatchers.deepep:DeepEPDispatcher.create",
    traffic=_deepep_traffic,
    exchange_group="etp-ep",
    crossing=_deepep_crossing,
    # a received token has each of its choices `etp` times
    saved_bytes=lambda sizes: _sorted_saved(sizes.reached * sizes.etp, sizes),
    prepared=lambda sizes: {"indices": PASSED, "probs": PASSED},
    eager=_BACK,
    multiprocessors=20,  # the package's default, and DeepSeek-V3's of 132 (arXiv 2412.19437, section 3.5)
    host_syncs=True,
    help="the kernels of the DeepEP package, also between machines",
)

DISPATCHERS: Registry[DispatcherSpec] = Registry("dispatcher", ALLTOALL, ALLGATHER, SYMMETRIC, DEEPEP)
DROPLESS = ALLTOALL.name  # which evaluations take where another one may drop tokens


def select_dispatcher(name: str, *, ep: int, etp: int, one_sequence: bool) -> DispatcherSpec:
    """Return the dispatcher for a grid: `name` with expert parallelism, else a dispatcher of local experts.

    one_sequence: the ranks of an etp group hold slices of the same sequence.
    """
    if ep > 1:
        return DISPATCHERS[name]
    if etp == 1:
        return LOCAL
    return SHARING if one_sequence else SHARING_SEQUENCES


def capturable_dispatchers() -> str:
    """Return the dispatchers whose every segment a graph can hold, for error messages."""
    specs = [spec for spec in DISPATCHERS.values() if spec.capturable]
    return "moe.dispatcher " + " or ".join(
        f'"{spec.name}"' + (f", {spec.requires}" if spec.requires else "") for spec in specs
    )
