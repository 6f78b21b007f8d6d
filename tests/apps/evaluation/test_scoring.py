"""Scores against one forward for each target, on any layout and in any division over ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from marks import full

from fastmp.apps.evaluation.batches import evaluate
from fastmp.apps.evaluation.journal import Journal
from fastmp.apps.evaluation.scoring import ScoredText, Scorer
from fastmp.apps.evaluation.tasks import EvalTask, ScoringWindows, _WindowRows
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement, gpt_stages
from fastmp.nn.moe.layer import MoELayer
from fastmp.testing.ranks import run_ranks
from tools.small_models import EXPERTS, QWEN, SEED, SMALL, make_gpt

CONFIGS = {
    "learned": replace(SMALL, init_std=0.5),
    "window": replace(QWEN, init_std=0.5, sliding_window=4),
    "experts": replace(EXPERTS, init_std=0.5),
    "shared": replace(EXPERTS, init_std=0.5, moe=replace(EXPERTS.moe, dispatcher="symmetric")),
    "limited": replace(
        EXPERTS, init_std=0.5, moe=replace(EXPERTS.moe, dispatcher="symmetric", symmetric_capacity=0.5)
    ),
}
IDS = np.random.default_rng(3).integers(SMALL.vocab_size, size=74)
WINDOWS = ScoringWindows(len(IDS) - 1, 16, 5)  # the last one is shorter, and scores 2
ROWS = _WindowRows(WINDOWS, lambda begin, end: IDS[begin:end])
UNEVEN = [
    ScoredText(IDS[i : i + n], scored)
    for i, (n, scored) in enumerate([(2, 1), (17, 3), (9, 8), (5, 2), (17, 16)])
]


@torch.no_grad()
def one_by_one(model, row):
    """The log-probability of each target, and whether it is the likeliest, by a forward of its own."""
    found = []
    for i in range(len(row.ids) - row.scored, len(row.ids)):
        logits_V = model(torch.tensor(row.ids[None, :i]))[-1, 0, : model.config.vocab_size]
        found.append((logits_V.log_softmax(-1)[row.ids[i]].item(), logits_V.argmax().item() == row.ids[i]))
    return found


def summarized(scores):
    return {"nats": math.fsum(score.log_prob for score in scores), "likeliest": [s.likeliest for s in scores]}


def task_of(rows=ROWS, order=None):
    return EvalTask("windows", "windows", rows, order or range(len(rows)), {}, summarized, likeliest=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["learned", "window", "experts"])
def test_scores_are_those_of_a_forward_for_each_target(name):
    model = make_gpt(CONFIGS[name]).eval()
    for rows in (UNEVEN, ROWS[-3:]):
        scores = Scorer(model, ParallelGroups.alone(), likeliest=True)(rows)
        for row, score in zip(rows, scores, strict=True):
            naive = one_by_one(model, row)
            assert score.log_prob == pytest.approx(math.fsum(each for each, _ in naive), rel=1e-12, abs=1e-10)
            assert score.likeliest == all(likeliest for _, likeliest in naive)


def test_a_target_that_is_the_likeliest_is_found():
    model = make_gpt(CONFIGS["learned"]).eval()
    ids = IDS[:4].tolist()
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[-1, 0, : model.config.vocab_size].argmax()))
    wrong = [*ids[:-1], (ids[-1] + 1) % model.config.vocab_size]
    rows = [ScoredText(np.array(each), scored) for each in (ids, wrong) for scored in (1, 3)]
    scores = Scorer(model, ParallelGroups.alone(), likeliest=True)(rows)
    assert [score.likeliest for score in scores] == [True, True, False, False]


@pytest.mark.full
def test_the_whole_task_is_the_sum_over_a_text_and_batches_make_no_difference():
    model = make_gpt(CONFIGS["learned"]).eval()
    naive = math.fsum(each for row in ROWS for each, _ in one_by_one(model, row))
    for batch_size in (1, 3, 50):
        made = evaluate(task_of(order=list(range(len(ROWS)))[::-1]), model, batch_size=batch_size)
        assert made["nats"] == pytest.approx(naive, rel=1e-12)


def divided(rank, world, name, layout, options):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    if layout.get("pp", 1) > 1:
        rng = RngTracker(SEED, tp_rank=group_rank(groups.tp), cp_rank=group_rank(groups.cp))
        (model,) = gpt_stages(CONFIGS[name], Placement(groups, rng=rng, dtype=torch.float64, **options))
    else:
        model = make_gpt(CONFIGS[name], groups, **options)
    return [evaluate(task_of(rows), model.eval(), groups=groups, batch_size=3) for rows in (ROWS, UNEVEN)]


SEQUENCE = {"sequence_parallel": True}


def in_graphs(rank, world, name, layout, options):
    groups = (
        ParallelGroups.create(RankGrid(world_size=world, **layout)) if world > 1 else ParallelGroups.alone()
    )
    model, backend = make_gpt(CONFIGS[name], groups, **options).eval(), RecordingBackend()
    for rows in (ROWS, UNEVEN):
        more = {"groups": groups, "batch_size": 3}
        assert evaluate(task_of(rows), model, backend=backend, **more) == evaluate(
            task_of(rows), model, **more
        )
    assert backend.nbytes > 0  # of the batches of one shape


@pytest.mark.parametrize(
    ("name", "layout", "options", "world"),
    [
        ("learned", {}, {}, 1),
        *full(
            [
                ("experts", {}, {}, 1),
                ("learned", {"tp": 2}, SEQUENCE, 2),
                ("window", {"cp": 2}, {}, 2),
                ("shared", {"tp": 2, "ep": 2, "etp": 1}, {}, 2),
            ]
        ),
    ],
)
def test_graphs_score_with_the_same_bits(name, layout, options, world):
    run_ranks(in_graphs, world, name, layout, options) if world > 1 else in_graphs(
        0, 1, name, layout, options
    )


def overflowing_case(rank, world, layout):
    """Batches that do not fit into symmetric memory are scored again, with the bits of an all-to-all."""
    groups, scored = ParallelGroups.create(RankGrid(world_size=world, **layout)), []
    ordinary, limited = (make_gpt(CONFIGS[name], groups).eval() for name in ("experts", "limited"))
    score = Scorer._score_of_batch

    def counted(self, batch):
        scored.append([layer.dispatcher.may_drop for layer in layers])
        return score(self, batch)

    layers = [module for module in limited.modules() if isinstance(module, MoELayer)]
    for rows in (ROWS, UNEVEN):
        more = {"groups": groups, "batch_size": 3}
        expected = evaluate(task_of(rows), ordinary, **more)
        Scorer._score_of_batch = counted
        assert evaluate(task_of(rows), limited, backend=RecordingBackend(), **more) == expected
        Scorer._score_of_batch = score
    assert all(layer.dropped_pairs == 0 for layer in layers)
    return sum(not any(each) for each in scored), sum(all(each) for each in scored)


@pytest.mark.parametrize("layout", [{"ep": 2}, *full([{"tp": 2, "ep": 2, "etp": 1}])], ids=str)
def test_batches_that_overflow_are_scored_again(layout):
    (again, eager_or_captured), _ = run_ranks(overflowing_case, 2, layout)
    assert again > 0 < eager_or_captured


def longer_case(rank, world, layout):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    ordinary, shared = (make_gpt(CONFIGS[name], groups).eval() for name in ("experts", "shared"))
    for rows, batch_size in (([UNEVEN[2]], 1), (UNEVEN, 1), (ROWS, 3), (UNEVEN, 2)):
        longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
        task = task_of(rows, longest_first)
        expected = evaluate(task, ordinary, groups=groups, batch_size=batch_size)
        assert evaluate(task, shared, groups=groups, batch_size=batch_size) == expected


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}], ids=str)
def test_memory_that_ranks_share_grows_with_rows(layout):
    run_ranks(longer_case, 2, layout)


def refused_case(rank, world, name, layout, message):
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    with pytest.raises(ValueError, match=message):
        Scorer(make_gpt(CONFIGS[name], groups).eval(), groups, backend=RecordingBackend())


@pytest.mark.full
def test_what_no_graph_can_score_is_refused():
    exchange = (
        "cannot be one graph, because dispatch, experts, combine must run eagerly .*; leave out --graphs"
    )
    run_ranks(refused_case, 2, "experts", {"ep": 2}, exchange)
    run_ranks(refused_case, 2, "learned", {"pp": 2}, "the 2 ranks of a pipeline agree on shapes .* --graphs")


@pytest.mark.parametrize(
    ("name", "layout", "options", "world"),
    [
        ("learned", {"tp": 2}, SEQUENCE, 2),
        *full(
            [
                ("window", {"tp": 2}, {}, 2),
                ("learned", {"cp": 2}, {}, 2),
                ("learned", {"pp": 2}, {}, 2),
                ("experts", {"ep": 2}, {}, 2),
                ("shared", {"ep": 2}, {}, 2),
                ("limited", {"ep": 2}, {}, 2),
                ("learned", {"tp": 2, "cp": 2}, SEQUENCE, 4),
                ("learned", {"cp": 2, "pp": 2}, {}, 4),
                ("learned", {"tp": 2, "pp": 2}, SEQUENCE, 4),
                ("experts", {"tp": 2, "ep": 2, "etp": 1, "pp": 2}, {}, 4),
                ("experts", {"tp": 1, "ep": 4}, {}, 4),
            ]
        ),
    ],
)
def test_layouts_score_alike(name, layout, options, world):
    model = make_gpt(CONFIGS[name]).eval()
    expected = [evaluate(task_of(rows), model, batch_size=3) for rows in (ROWS, UNEVEN)]
    for made in run_ranks(divided, world, name, layout, options):
        for mine, one in zip(made, expected, strict=True):
            assert mine["nats"] == pytest.approx(one["nats"], rel=1e-12)
            assert mine["likeliest"] == one["likeliest"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_batches_have_the_same_bits(ranks):
    """Five batches of 13 windows: in the last turn some ranks have none of their own."""
    expected = evaluate(task_of(), make_gpt(CONFIGS["learned"]).eval(), batch_size=3)
    made = run_ranks(divided, ranks, "learned", {}, {})
    assert [each[0] for each in made] == [expected] * ranks


class Killed(BaseException):
    pass


def killed_after(number):
    def report(*of_rows):
        nonlocal number
        number -= 1
        if number == 0:
            raise Killed

    return report


@pytest.mark.parametrize("cut", [5, *full([0])])
def test_what_was_killed_goes_on_with_the_same_bits(tmp_path, cut):
    """`cut` bytes of the last line were not written."""
    model, path = make_gpt(CONFIGS["learned"], dtype=torch.float32).eval(), tmp_path / "part"
    expected = evaluate(task_of(), model, batch_size=3)
    with pytest.raises(Killed):
        evaluate(task_of(), model, batch_size=3, journal=Journal(path, {"a": 1}), report=killed_after(3))
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) - cut])
    journal, turns = Journal(path, {"a": 1}), []
    assert sorted(journal.finished) == [0, 1, 2][: 3 - (cut > 0)]
    assert (
        evaluate(task_of(), model, batch_size=3, journal=journal, report=lambda *n: turns.append(n))
        == expected
    )
    assert len(turns) == 2 + (cut > 0)
    assert sorted(Journal(path, {"a": 1}).finished) == [0, 1, 2, 3, 4]


def goes_on(rank, world, path):
    groups = ParallelGroups.create(RankGrid(world_size=world))
    model = make_gpt(CONFIGS["learned"], groups, dtype=torch.float32).eval()
    journal = None if rank else Journal(path, {})
    return evaluate(task_of(), model, groups=groups, batch_size=3, journal=journal)


@pytest.mark.full
def test_more_ranks_go_on_with_the_same_bits(tmp_path):
    model = make_gpt(CONFIGS["learned"], dtype=torch.float32).eval()
    expected, path = evaluate(task_of(), model, batch_size=3), tmp_path / "part"
    with pytest.raises(Killed):
        evaluate(task_of(), model, batch_size=3, journal=Journal(path, {}), report=killed_after(2))
    assert run_ranks(goes_on, 2, path) == [expected] * 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"abc\n", "is no part of an evaluation; name another --out"),
        (b"abc", "is no part of an evaluation; name another --out"),
        (b'{"format": "fastmp-evaluation-1", "a": 2}\n', "is part of another evaluation, with a 2, not 1"),
        (b'{"format": "fastmp-evaluation-1", "a": 1}\n[0, [1.0]]\n', "line 2 is damaged: delete the file"),
        (b'{"format": "fastmp-evaluation-1", "a": 1}\n[0, [NaN, 1]]\n', "line 2 is damaged"),
        (b'{"format": "fastmp-evaluation-1", "a": 1}\n[0, [NaN, true]]\n', "line 2 is damaged"),
        (b'{"format": "fastmp-evaluation-1", "a": 1}\n[0]\n[0]\n', "line 3 is damaged"),
    ],
)
def test_files_of_other_evaluations_are_refused(tmp_path, content, named):
    path = tmp_path / "part"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=named):
        Journal(path, {"a": 1})
    assert path.read_bytes() == content


def test_two_evaluations_do_not_write_one_file(tmp_path):
    journal = Journal(tmp_path / "part", {"a": 1})
    journal.add(0, [(-1.0, False)])
    other = f"""
from pathlib import Path
from fastmp.apps.evaluation import Journal
Journal(Path({str(journal.path)!r}), {{"a": 1}})
"""
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert "ValueError" in done.stderr and "part: another evaluation writes it now" in done.stderr
    journal.close()
    assert Journal(journal.path, {"a": 1}).finished == {0: [(-1.0, False)]}


def test_batches_that_do_not_fit_and_scores_that_are_not_finite(tmp_path):
    model, path = make_gpt(CONFIGS["learned"]).eval(), tmp_path / "part"
    Journal(path, {}).add(0, [(-1.0, False)])
    with pytest.raises(ValueError, match="batch 0 is damaged"):
        evaluate(task_of(), model, batch_size=3, journal=Journal(path, {}))
    with torch.no_grad():
        model.final_norm.weight[3] = torch.nan
    with pytest.raises(ValueError, match="windows: log-probabilities are not finite"):
        evaluate(task_of(), model)


def wrong_on_one(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world))
    model = make_gpt(CONFIGS["learned"], groups).eval()
    rows = [*ROWS[:3], ScoredText(np.array([1, SMALL.vocab_size]), 1)]
    with pytest.raises(ValueError, match="token id 131 is outside the model's vocabulary of 131"):
        evaluate(task_of(rows), model, groups=groups, batch_size=2)
    if world > 1:
        groups = ParallelGroups.create(RankGrid(world_size=world, cp=world))
        model = make_gpt(replace(CONFIGS["learned"], max_seq_len=18), groups).eval()
        with pytest.raises(ValueError, match="a window of 18 tokens, 20 as the layout divides it, is longer"):
            evaluate(task_of([ScoredText(IDS[:19], 1)]), model, groups=groups)


@pytest.mark.parametrize("ranks", [2, *full([1])])
def test_rows_that_a_model_cannot_take(ranks):
    run_ranks(wrong_on_one, ranks) if ranks > 1 else wrong_on_one(0, 1)
    with pytest.raises(ValueError, match="a window of 29 tokens is longer than the model's 20 positions"):
        evaluate(task_of([ScoredText(IDS[:30], 1)]), make_gpt(CONFIGS["learned"]).eval())
