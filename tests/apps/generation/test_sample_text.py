"""Generated text: what is drawn, from which window, and that every tensor-parallel rank draws the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fastmp.apps.generation.sample_text import choose_tokens, generate, generate_text
from fastmp.config import GPTConfig
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement
from fastmp.testing.ranks import run_ranks
from fastmp.training.data.tokenize import ByteTokenizer
from fastmp.training.language import next_logits

BYTES = ByteTokenizer()


class NextLetter:
    """Logits (V,): after token t comes t + 1, by `margin` nats over any other. Remembers inputs."""

    def __init__(self, margin=50.0, vocab=384):
        self.margin, self.vocab, self.seen = margin, vocab, []

    def __call__(self, tokens_BS, position):
        self.seen.append(tokens_BS)
        logits = torch.zeros(self.vocab)
        logits[257:] = 1e9  # padding of the vocabulary: must never be drawn
        return logits.index_fill(0, (tokens_BS[0, position] + 1) % 257, self.margin)


def test_greedy_follows_the_likeliest():
    text = generate_text(
        NextLetter(), "abc", tokenizer=BYTES, max_new_tokens=5, max_seq_len=64, temperature=0.0
    )
    assert text == "defgh"


def test_stops_before_end_of_text():
    ids = generate(NextLetter(), [250], tokenizer=BYTES, max_new_tokens=20, max_seq_len=64, temperature=0.0)
    assert ids == [251, 252, 253, 254, 255]


def test_window_and_shapes():
    model = NextLetter()
    prompt = [i % 200 for i in range(150)]
    generate(model, prompt, tokenizer=BYTES, max_new_tokens=60, max_seq_len=160, temperature=0.0)
    assert {tuple(tokens.shape) for tokens in model.seen} == {(1, 160)}
    assert model.seen[-1][0].tolist() == (prompt + list(range(150, 209)))[-160:]
    short = NextLetter()
    generate(short, [1, 2], tokenizer=BYTES, max_new_tokens=1, max_seq_len=160, temperature=0.0)
    assert short.seen[0].shape == (1, 64) and short.seen[0][0, :3].tolist() == [1, 2, BYTES.end_of_text]


def test_draws_have_the_right_frequencies():
    """Token t + 1 is exp(margin) times likelier than each of 256 others: p = e^m / (e^m + 256)."""
    margin, draws = 6.0, 600
    p = torch.tensor([margin, *[0.0] * 256]).softmax(0)[0].item()
    ids = [5]
    hits = 0
    for seed in range(draws):
        (token,) = generate(
            NextLetter(margin), ids, tokenizer=BYTES, max_new_tokens=1, max_seq_len=64, seed=seed
        ) or [None]
        hits += token == 6
    assert abs(hits / draws - p) < 4 * (p * (1 - p) / draws) ** 0.5
    cold = [
        generate(
            NextLetter(margin),
            ids,
            tokenizer=BYTES,
            max_new_tokens=1,
            max_seq_len=64,
            seed=s,
            temperature=0.2,
        )
        for s in range(100)
    ]
    assert cold == [[6]] * 100


def test_one_seed_one_text_and_no_other_generator_moves():
    options = {"tokenizer": BYTES, "max_new_tokens": 30, "max_seq_len": 64}
    state = torch.get_rng_state()
    texts = [generate_text(NextLetter(2.0), "x", seed=seed, **options) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ([], {}, "prompt is empty"),
        ([257], {}, "prompt id 257 is outside the vocabulary of 257"),
        ([1], {"temperature": -0.5}, "temperature must not be negative, got -0.5"),
        ([1], {"temperature": float("nan")}, "temperature must not be negative, got nan"),
        ([1], {"top_k": -1}, "top_k must not be negative, got -1"),
        ([1], {"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ],
)
def test_bad_arguments(prompt, options, named):
    with pytest.raises(ValueError, match=named):
        generate(NextLetter(), prompt, tokenizer=BYTES, max_new_tokens=1, max_seq_len=8, **options)


SHARES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15], dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.7}, {1, 3}),  # their shares are enough
        ({"top_p": 0.72}, {1, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 4, "top_p": 0.9}, {1, 3, 4, 2}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # of the three alone
        ({"temperature": 0.0}, {1}),
        ({"temperature": 0.5, "top_k": 2}, {1, 3}),
    ],
)
def test_tokens_are_drawn_by_their_shares_among_those_that_are_kept(options, kept):
    points = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens = choose_tokens(SHARES.log().expand(4000, -1), points, **options)
    expected = SHARES ** (1 / (options.get("temperature", 1.0) or 1.0))
    expected = torch.tensor([share * (i in kept) for i, share in enumerate(expected)])
    found = torch.bincount(tokens, minlength=5) / 4000
    assert torch.allclose(found.double(), expected / expected.sum(), atol=3e-4)


def test_equally_likely_tokens_stay_together_and_rows_are_on_their_own():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    points = torch.tensor([0.999999, 0.999999], dtype=torch.float64)
    assert choose_tokens(logits, points, top_k=1).tolist() == [2, 0]
    assert choose_tokens(logits, points, temperature=0.0).tolist() == [1, 0]
    drawn = choose_tokens(logits, points)
    alone = [choose_tokens(logits[row : row + 1], points[row : row + 1]) for row in range(2)]
    assert torch.equal(drawn, torch.cat(alone))


def test_a_point_at_the_very_end_is_a_token_that_is_kept():
    logits = torch.randn(64, 999, generator=torch.Generator().manual_seed(1))
    logits[:, -1] = -1e4
    points = torch.full((64,), 1 - 2**-53, dtype=torch.float64)
    tokens = choose_tokens(logits, points, top_k=7, top_p=0.9)
    assert (logits.gather(1, tokens[:, None]) >= logits.topk(7).values[:, -1:]).all()


CONFIG = GPTConfig(num_layers=1, hidden_size=32, num_heads=2, vocab_size=257, max_seq_len=64, init_std=0.3)


def generate_on_rank(rank, tp, sequence_parallel):
    groups = ParallelGroups.create(RankGrid(world_size=tp, tp=tp)) if tp > 1 else ParallelGroups.alone()
    torch.manual_seed(0)
    model = next_logits(
        GPT(CONFIG, Placement(groups, sequence_parallel=sequence_parallel, dtype=torch.float64))
    )
    group = groups.tp
    return [
        generate(
            model,
            [72, 105],
            tokenizer=BYTES,
            max_new_tokens=70,
            max_seq_len=64,
            temperature=t,
            seed=3,
            group=group,
        )
        for t in (0.0, 1.0)
    ]


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.full)])
def test_every_rank_generates_what_one_rank_alone_does(sequence_parallel):
    alone = generate_on_rank(0, 1, False)
    assert run_ranks(generate_on_rank, 2, sequence_parallel) == [alone, alone]
    assert len(alone[1]) > 10


def test_ranks_that_run_the_model_together_take_the_first_ones_tokens():
    """Two ranks whose models disagree, one of them about where the text ends."""

    def ends(tokens_BS, position):
        return torch.zeros(257).index_fill(0, torch.tensor(BYTES.end_of_text), 9.0)

    def rank_main(rank, world_size):
        model = NextLetter() if rank == 0 else ends
        options = {"tokenizer": BYTES, "max_new_tokens": 5, "max_seq_len": 8, "temperature": 0.0}
        return generate(model, [97], together=dist.group.WORLD, **options)

    expected = generate(NextLetter(), [97], tokenizer=BYTES, max_new_tokens=5, max_seq_len=8, temperature=0.0)
    assert run_ranks(rank_main, 2) == [expected] * 2 and len(expected) == 5
