"""Three silent faults that users of other libraries have reported, beside the same computation here.

Each fault is rebuilt in a few lines from what its report says; no code of the library that has it runs, apart
from torch's own. None of them raises anything: training goes on with other numbers.

*Label smoothing over a divided vocabulary.* The smoothing takes the width of a rank's shard for the size of
the vocabulary, and the mean of its own log-probabilities for that of all. So losses depend on the number of
ranks, and differ between them. Here a rank's statistics carry the sum of its logits, and all ranks merge the
same numbers.

*Rows of grouped products that nobody writes.* With expert parallelism the rows of other ranks' experts come
last, behind the last offset. The product leaves their memory as it was, in the result and in the gradient.
Fresh memory is zero and hides it; memory that was used makes NaN, which reaches every token that had a copy
there. Here those rows are zeros. Memory is filled with NaN beforehand to show it.

*Pipeline messages that cross.* With two pipeline ranks the next rank and the previous rank are the same one.
A batch of sends and receives without tags in a fixed order (to the previous rank, from it, to the next, from
it) then delivers gradients as activations. Here every message has a place in one order that both ranks share,
which is planned before the step. Both are sent by gloo between two processes, without tags, as NCCL has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastmp.ops import grouped_mm
from fastmp.schedule.messages import Message, rank_programs
from fastmp.schedule.schedule import FORWARD, Schedule
from fastmp.tensor_parallel.loss import vocab_parallel_cross_entropy
from fastmp.testing.ops import poisoned_memory
from fastmp.testing.ranks import run_ranks
from tools.prove.claims import Claim, Table

SMOOTHING, VOCABULARY, TOKENS = 0.1, 16, 64
SMOOTHING_SOURCE = "github.com/NVIDIA/Megatron-LM/issues/7464, 737"
ROWS_SOURCE = "github.com/huggingface/transformers/pull/48205"
MESSAGES_SOURCE = "github.com/NVIDIA/Megatron-LM/issues/1450, 750"
_EXCHANGES = 8  # in which both ranks send an activation and a gradient

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (M, K), w (E, N, K), offsets -> (M, N)


def claims() -> Iterator[Claim | Table]:
    """Return the claims on three faults, each with the broken code first."""
    yield from _smoothing()
    yield from _rows()
    yield from _messages()


def _smoothing() -> Iterator[Claim | Table]:
    rows = []
    for ranks in (2, 4):
        found = run_ranks(smoothed, ranks)
        errors = torch.tensor([each[:2] for each in found], dtype=torch.float64)
        theirs, ours = errors.amax(0).tolist()  # NaN if any rank's is
        spread = (found[0][2] - found[-1][2]).abs().max().item()
        rows.append([ranks, theirs, spread, ours])
        says = f"largest error of a token's smoothed loss on {ranks} ranks"
        yield Claim.more_than(f"{says}, by shards as reported of Megatron-LM", theirs, 1e-3, SMOOTHING_SOURCE)
        yield Claim.at_most(f"{says}, by fastmp", ours, 1e-10)
    columns = ("ranks", "by shards: error", "by shards: first rank beside last", "fastmp: error")
    yield Table("Label smoothing 0.1 over 16 words, errors of the loss of a token", columns, rows)


def smoothed(rank: int, world: int) -> tuple[float, float, Tensor]:
    """Return the loss error of a per-shard label smoothing, of fastmp's, and the losses of the former."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    logs = logits.log_softmax(-1)
    whole, by_shard = (_smooth(part, logs, target) for part in (logs, logs.chunk(world, -1)[rank]))
    own = logits.chunk(world, -1)[rank].contiguous()
    ours = vocab_parallel_cross_entropy(own, target, group=dist.group.WORLD, label_smoothing=SMOOTHING)
    right = F.cross_entropy(logits, target, reduction="none", label_smoothing=SMOOTHING)
    return (by_shard - whole).abs().max().item(), (ours - right).abs().max().item(), by_shard


def _smooth(part: Tensor, logs: Tensor, target: Tensor) -> Tensor:
    """Return smoothed losses over `part` of the log-probabilities instead of the vocabulary."""
    size = part.shape[-1]
    share = SMOOTHING * size / (size - 1)  # what a wrong word gets, spread over the right one too
    return -(1 - share) * logs.gather(-1, target[:, None])[:, 0] - share * part.mean(-1)


def _rows() -> Iterator[Claim | Table]:
    theirs = getattr(F, "grouped_mm", None)
    says, release = "tokens, of 8, whose gradient is NaN", torch.__version__
    if theirs is None:
        yield Claim.not_shown(f"{says}, by F.grouped_mm of torch", f"torch {release} has none")
    elif lost := nan_tokens(lambda x, w, offsets: theirs(x, w.transpose(1, 2), offs=offsets)):
        yield Claim.more_than(f"{says}, by F.grouped_mm of torch {release}", lost, 0, ROWS_SOURCE)
    else:
        yield Claim.not_shown(f"{says}, by F.grouped_mm of torch", f"torch {release} writes all rows here")
    yield Claim.at_most(f"{says}, by fastmp.ops.grouped_mm", nan_tokens(grouped_mm), 0)


def nan_tokens(product: Product) -> int:
    """Return how many of 8 tokens get NaN gradients through an expert MLP that keeps 16 of 24 rows."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randn(8, 16, generator=draw, requires_grad=True)
    up, down = (torch.randn(2, *shape, generator=draw) for shape in ((64, 16), (16, 32)))
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    with poisoned_memory():
        x = tokens.repeat(3, 1)  # the last copies belong to experts of other ranks
        gate, value = product(x, up, offsets).chunk(2, -1)
        y = product((F.silu(gate) * value).contiguous(), down, offsets)
        kept = torch.where(torch.arange(24)[:, None] < offsets[-1], y, 0)
        (gradient,) = torch.autograd.grad(kept.sum(), tokens)
    return int(gradient.isnan().any(-1).sum())


def _messages() -> Iterator[Claim | Table]:
    theirs = sum(run_ranks(fixed_order, 2))
    total = 2 * 2 * _EXCHANGES
    says = "pipeline messages, of {}, that arrive in the place of others"
    fixed = f"{says.format(total)}, in a fixed order as reported of Megatron-LM"
    yield Claim.more_than(fixed, theirs, 0, MESSAGES_SOURCE)
    wrong, sent = (sum(each) for each in zip(*run_ranks(planned_order, 2)))
    yield Claim.at_most(f"{says.format(sent)}, in the order that fastmp plans", wrong, 0)


def fixed_order(rank: int, world: int) -> int:
    """Return the number of this rank's messages of the wrong kind in fixed-order exchanges."""
    peer, wrong = 1 - rank, 0
    gradient, activation = torch.tensor(-1.0), torch.tensor(1.0)
    for _ in range(_EXCHANGES):
        from_previous, from_next = torch.zeros(()), torch.zeros(())
        both = [(dist.isend, gradient), (dist.irecv, from_previous)]
        both += [(dist.isend, activation), (dist.irecv, from_next)]
        for work in dist.batch_isend_irecv([dist.P2POp(what, tensor, peer) for what, tensor in both]):
            work.wait()
        wrong += int(from_previous != activation) + int(from_next != gradient)
    return wrong


def planned_order(rank: int, world: int) -> tuple[int, int]:
    """Return the number of mismatched messages of a planned step, and of messages this rank sends."""
    plan = rank_programs(Schedule(world, 8, 2).orders())[rank]
    works, arrived, sent = list[dist.Work | None](), list[tuple[Tensor, Tensor]](), 0
    for message in (message for posts in plan.posts for message in posts):
        content = _named(message)
        if message.source == rank:
            works.append(dist.isend(content, message.target))
            sent += 1
        else:
            arrived.append((torch.zeros_like(content), content))
            works.append(dist.irecv(arrived[-1][0], message.source))
    for work in filter(None, works):
        work.wait()
    return sum(not torch.equal(got, expected) for got, expected in arrived), sent


def _named(message: Message) -> Tensor:
    """Return an identifier of a message."""
    return torch.tensor([message.kind == FORWARD, message.stage, message.microbatch], dtype=torch.int64)
