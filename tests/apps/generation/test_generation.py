"""Batches of prompts: what each becomes, alone or in company, in graphs, and on any layout."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from marks import full

from fastmp.apps.generation import batched
from fastmp.apps.generation.batched import Completion, generate
from fastmp.apps.generation.incremental import Decoder
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.distributed.collectives import group_rank
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Placement, gpt_stages
from fastmp.nn.moe.layer import MoELayer
from fastmp.testing.ranks import run_ranks
from fastmp.training.data.tokenize import ByteTokenizer
from tools.small_models import EXPERTS, QWEN, SEED, SMALL, make_gpt

PROMPTS = [[5, 9, 2, 77, 30], [11], [64, 64, 3]]
GREEDY = {"max_new_tokens": 9, "temperature": 0.0}
DRAWN = {"max_new_tokens": 9, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "seed": 5}
CONFIGS = {
    "learned": replace(SMALL, init_std=0.5),
    "window": replace(QWEN, init_std=0.5, sliding_window=4),
    "experts": replace(EXPERTS, init_std=0.5),
    "shared": replace(EXPERTS, init_std=0.5, moe=replace(EXPERTS.moe, dispatcher="symmetric")),
    "limited": replace(
        EXPERTS, init_std=0.5, moe=replace(EXPERTS.moe, dispatcher="symmetric", symmetric_capacity=1.0)
    ),
}


def model_of(name, groups=ParallelGroups.alone()):
    return make_gpt(CONFIGS[name], groups).eval()


def ids_of(generated):
    return [row.ids for row in generated.rows]


@torch.no_grad()
def greedily(model, prompt, number):
    """The likeliest tokens, each from a forward over everything before it."""
    ids = list(prompt)
    for _ in range(number):
        ids.append(int(model(torch.tensor([ids]))[-1, 0, : model.config.vocab_size].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["window", *full(["learned", "experts"])])
def test_greedy_is_the_likeliest_of_the_whole_sequence(name):
    model = model_of(name)
    generated = generate(model, PROMPTS, **GREEDY)
    assert ids_of(generated) == [greedily(model, prompt, 9) for prompt in PROMPTS]
    assert len({tuple(row) for row in ids_of(generated)}) == 3
    assert (generated.prompt_tokens, generated.decoded_tokens) == (9, 24)


@pytest.mark.parametrize("name", full(["learned", "window", "experts"]))
@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_steps_in_a_graph_are_the_same(name, options):
    """Also a second batch of another size, and a graph that nothing of the first one is left in."""
    model = model_of(name)
    for prompts in (PROMPTS, PROMPTS[:1]):
        backend = RecordingBackend()
        assert ids_of(generate(model, prompts, backend=backend, **options)) == ids_of(
            generate(model, prompts, **options)
        )
        assert backend.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["learned", "window", "experts"])
@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_steps_in_a_graph_on_a_gpu_are_the_same(name, options, monkeypatch):
    on = Placement(rng=RngTracker(SEED, device="cuda"), device="cuda", dtype=torch.float64)
    model = GPT(CONFIGS[name], on).eval()
    for prompts in (PROMPTS, PROMPTS[:1]):
        graphed = ids_of(generate(model, prompts, **options))
        with monkeypatch.context() as patch:
            patch.setattr(batched, "CudaBackend", lambda: None)
            assert ids_of(generate(model, prompts, **options)) == graphed


def test_a_row_does_not_depend_on_its_company():
    model = model_of("learned")
    together = ids_of(generate(model, PROMPTS, **DRAWN))
    for i, prompt in enumerate(PROMPTS):
        assert ids_of(generate(model, [prompt], **{**DRAWN, "seed": 5 + i})) == [together[i]]
    assert ids_of(generate(model, PROMPTS, **{**DRAWN, "seed": 9})) != together


class Spells:
    """Stands in for `choose_tokens`: the tokens of `texts`, whatever the model says."""

    def __init__(self, texts):
        self.texts, self.at = texts, 0

    def __call__(self, logits_BV, points_B, **choice):
        self.at += 1
        return torch.tensor([text[self.at - 1] for text in self.texts])


@pytest.mark.parametrize(
    ("stop", "first", "second"),
    [
        ((". c", "bab"), ("ab", "stop string"), ("a", "stop string")),
        *full(
            [
                ((), ("ab. cd. ef", "end of text"), ("abababab\ufffd\ufffdx", "length")),
                (("\u00e9", "ba"), ("ab. cd. ef", "end of text"), ("a", "stop string")),
                (("f", "e"), ("ab. cd. ", "stop string"), ("abababab\ufffd\ufffdx", "length")),
            ]
        ),
    ],
)
def test_stop_strings_lie_across_tokens(stop, first, second, monkeypatch):
    """Bytes are tokens here: every string of two characters lies across a border."""
    tokens = [[*b"ab. cd. ef", 256, 0], [*b"abababab", 0xC3, 0xC3, *b"xy"], [256] * 12]
    monkeypatch.setattr("fastmp.apps.generation.batched.choose_tokens", Spells(tokens))
    model = make_gpt(replace(SMALL, vocab_size=257)).eval()
    generated = generate(model, PROMPTS, tokenizer=ByteTokenizer(), stop=stop, max_new_tokens=11)
    assert [(row.text, row.reason) for row in generated.rows] == [first, second, ("", "end of text")]
    lengths = [len(row.ids) + (row.reason == "end of text") for row in generated.rows]
    assert generated.decoded_tokens == sum(lengths) - 3


class Counts(ByteTokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return super().decode(ids)


def test_long_texts_are_not_decoded_again_for_each_token():
    tokenizer = Counts()
    row = Completion([1], 2000, tokenizer, ("two", "three"))
    row.take([*b"one " * 499, *b"two"])
    assert row.continuation() == ([*b"one " * 499, *b"two"], "one " * 499, "stop string", None)
    assert tokenizer.decoded < 100 * 2000


@pytest.mark.parametrize("seed", [0, *full(range(1, 20))])
def test_stop_strings_are_found_as_soon_as_they_are_there(seed):
    """Characters cut in two, tokens that stand for no text, and stop strings of several lengths."""
    generator = random.Random(seed)
    tokenizer, stop = ByteTokenizer(), ("\u65e5\u672c" * 2, "ab" * 11, "\U0001f600\u65e5a")
    characters = [each.encode() for each in "\u65e5\u672c\U0001f600"]
    pieces = [b"a", b"b", b"ab" * 5, *characters, *(each[:2] for each in characters)]
    ids = [i for _ in range(300) for i in (*generator.choice(pieces), *[256] * generator.choice([0, 0, 9]))]
    ids += stop[0].encode()
    row = Completion([1], len(ids), tokenizer, stop)
    for number, token in enumerate(ids, 1):
        row.take([token])
        text = tokenizer.decode(ids[:number])
        assert row.done == any(each in text for each in stop), number
        if row.done:
            break
    assert row.done and row.continuation().text == text[: min(text.find(s) for s in stop if s in text)]


@pytest.mark.full
def test_ids_hold_the_whole_stop_string(monkeypatch):
    monkeypatch.setattr("fastmp.apps.generation.batched.choose_tokens", Spells([[*b"one two three"]]))
    model = make_gpt(replace(SMALL, vocab_size=257)).eval()
    (row,) = generate(model, [[1]], tokenizer=ByteTokenizer(), stop=["two"], max_new_tokens=13).rows
    assert row[:3] == ([*b"one two"], "one ", "stop string")


@pytest.mark.full
def test_ends_are_any_tokens():
    model = model_of("learned")
    whole = greedily(model, PROMPTS[0], 9)
    end = whole[5]
    (row,) = generate(model, PROMPTS[:1], ends=[end], **GREEDY).rows
    assert row[:3] == (whole[: whole.index(end)], "", "end of text")


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ([], {}, "a prompt is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[1, 131]], {}, "prompt id 131 is outside the vocabulary of 131"),
        ([[1] * 5], {"max_new_tokens": 17}, "5 tokens and 17 new ones .* 20 positions; at most 16 new ones"),
        ([[1] * 30], {"max_new_tokens": 1}, "at most 0 new ones"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be positive, got 0"),
        ([[1]], {"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ([[1]], {"stop": ["a"]}, "stop strings need a tokenizer"),
        ([[1]], {"stop": [""], "tokenizer": ByteTokenizer()}, "a character each"),
    ],
)
def test_mistakes(prompts, options, named):
    with pytest.raises(ValueError, match=named):
        generate(model_of("learned"), prompts, **{"max_new_tokens": 3, **options})


@pytest.mark.full
def test_all_positions_of_a_model_are_used():
    model = model_of("learned")
    (row,) = generate(model, [[1] * 5], max_new_tokens=16, temperature=0.0).rows
    assert row.ids == greedily(model, [1] * 5, 16) and len(row.ids) == 16


def divided(rank, world, name, layout, graphs):
    """The ids that this rank returns."""
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    if "pp" in layout:
        rng = RngTracker(SEED, tp_rank=group_rank(groups.tp))
        (model,) = gpt_stages(CONFIGS[name], Placement(groups, rng=rng, dtype=torch.float64))
    else:
        model = make_gpt(CONFIGS[name], groups)
    return [
        ids_of(
            generate(
                model.eval(),
                PROMPTS,
                groups=groups,
                backend=RecordingBackend() if graphs else None,
                **options,
            )
        )
        for options in (GREEDY, DRAWN)
    ]


@pytest.mark.parametrize("graphs", [False, *full([True])])
@pytest.mark.parametrize(
    ("name", "layout", "world"),
    [
        ("experts", {"tp": 1, "ep": 2}, 2),
        *full(
            [
                ("window", {"tp": 2}, 2),
                ("learned", {"pp": 2}, 2),
                ("learned", {}, 2),
                ("experts", {"tp": 2}, 2),
                ("experts", {"tp": 2, "ep": 2, "etp": 1}, 2),
                ("shared", {"ep": 2}, 2),
                ("shared", {"tp": 2, "ep": 2, "etp": 1}, 2),
                ("limited", {"ep": 2}, 2),
                ("learned", {"tp": 2, "pp": 2}, 4),
                ("experts", {"pp": 2, "ep": 2, "etp": 1}, 4),
            ]
        ),
    ],
)
def test_layouts_generate_what_one_rank_does(name, layout, world, graphs):
    expected = [ids_of(generate(model_of(name), PROMPTS, **options)) for options in (GREEDY, DRAWN)]
    assert run_ranks(divided, world, name, layout, graphs) == [expected] * world


def overflowing(rank, world, layout, capacity):
    """The ids of experts whose symmetric memory is too small for some steps, and how many steps ran twice."""
    groups, found, repeated = ParallelGroups.create(RankGrid(world_size=world, **layout)), [], []
    steps = Decoder._steps

    def counted(self, points_BN, parts):
        repeated.append(parts is self._eager_parts)
        return steps(self, points_BN, parts)

    limited = replace(CONFIGS["limited"], moe=replace(CONFIGS["limited"].moe, symmetric_capacity=capacity))
    for config in (CONFIGS["experts"], limited):
        model = make_gpt(config, groups).eval()
        for options in (GREEDY, DRAWN):
            Decoder._steps, repeated = counted, []
            backend = RecordingBackend()
            found.append(ids_of(generate(model, PROMPTS, groups=groups, backend=backend, **options)))
        assert config is limited or not any(repeated)
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    assert layer.dropped_pairs == 0
    assert found[:2] == found[2:]
    return repeated


@pytest.mark.parametrize(
    ("layout", "capacity"), [({"ep": 2}, 0.22), *full([({"tp": 2, "ep": 2, "etp": 1}, 0.17)])], ids=str
)
def test_steps_that_overflow_are_repeated(layout, capacity):
    repeated, other = run_ranks(overflowing, 2, layout, capacity)
    assert repeated == other and any(repeated)


def longer(rank, world, layout, graphs):
    """One call after the other with longer prompts, and more of them, in the memory that ranks share."""
    groups, found = ParallelGroups.create(RankGrid(world_size=world, **layout)), []
    for name in ("experts", "shared"):
        model, before = model_of(name, groups), 0
        for prompts in (PROMPTS[1:2], PROMPTS, [*PROMPTS, *PROMPTS], PROMPTS):
            backend = RecordingBackend() if graphs else None
            found.append(ids_of(generate(model, prompts, groups=groups, backend=backend, **DRAWN)))
            if groups.exchange.memory is not None:
                room, before = before, groups.exchange.views.capacity
                assert before > room or prompts is PROMPTS
    assert found[:4] == found[4:]
    graph = FunctionGraph(model, [model], backend=RecordingBackend(), name="a forward", advice="")
    with torch.no_grad():
        for _ in range(3):
            graph(torch.tensor(PROMPTS[:1]))
    with pytest.raises(ValueError, match=r"graphs hold the memory .* MoELayer.reserve before they are capt"):
        generate(model, [[7] * 12] * 4, groups=groups, **DRAWN)
    with torch.no_grad():
        graph(torch.tensor(PROMPTS[:1]))
    graph.remove()
    generate(model, [[7] * 12] * 4, groups=groups, **DRAWN)


@pytest.mark.parametrize("graphs", [False, *full([True])])
@pytest.mark.parametrize("layout", [{"ep": 2}, *full([{"tp": 2, "ep": 2, "etp": 1}])], ids=str)
def test_memory_that_ranks_share_grows_with_prompts(layout, graphs):
    run_ranks(longer, 2, layout, graphs)


def lost(rank, world):
    """One of the ranks that divide the prompts has a row whose logits become NaN."""
    groups = ParallelGroups.create(RankGrid(world_size=world))
    model = model_of("learned", groups)
    with torch.no_grad():
        next(model.parameters())[77] = torch.nan  # the embedding of a token of the first prompt
    with pytest.raises(ValueError, match="prompt 1 has logits that are not finite after 0 new tokens"):
        generate(model, PROMPTS, groups=groups, **GREEDY)


@pytest.mark.parametrize("ranks", [1, *full([2])])
def test_logits_that_are_not_finite_are_no_text(ranks):
    run_ranks(lost, ranks) if ranks > 1 else lost(0, 1)


def refused(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, cp=2))
    with pytest.raises(ValueError, match="without context and sequence parallelism, got cp 2"):
        generate(model_of("learned", groups), PROMPTS, groups=groups, **GREEDY)


@pytest.mark.full
def test_context_parallel_models_are_refused():
    run_ranks(refused, 2)
