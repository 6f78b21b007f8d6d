"""Blends: shares that hold after every sample, the same samples on any layout, sources that fit together."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron_tools import texts_of_bytes, write_megatron
from train_tools import arguments, losses

from fastmp.apps.data import main
from fastmp.apps.train import main as train
from fastmp.config import DataConfig
from fastmp.config.data_files import expected_vocab_size
from fastmp.plan.resources import main as plan
from fastmp.training.data.blend import LONGEST_PERIOD, Blend, BlendedDataset, open_dataset
from fastmp.training.data.corpus import build
from fastmp.training.data.dataset import TokenDataset
from fastmp.training.metrics import read_metrics


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.integers(1, 60), min_size=1, max_size=9), first=st.integers(0, 10**12))
@example(weights=[69, 10, 1, 69], first=0)  # where the source that is furthest behind should not come next
@example(weights=[66, 5, 66, 5, 66, 1], first=7)
def test_shares_hold_within_a_sample_after_every_sample(weights, first):
    blend = Blend(weights)
    total = sum(weights)
    sources, samples = blend.locate(0, 2 * blend.period)
    given_ = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    numbers = np.arange(1, len(sources) + 1)[:, None]
    # exact, in whole numbers: |n_s - i w_s / W| < 1
    assert (np.abs(given_ * total - numbers * np.array(weights)) < total).all()
    for source in range(len(weights)):
        of_it = samples[sources == source]
        assert of_it.tolist() == list(range(len(of_it)))  # each of its samples once, in order
    later, of_later = blend.locate(first, 50)
    q, r = divmod(first, blend.period)
    assert later.tolist() == [int(sources[(r + i) % blend.period]) for i in range(50)]
    for i in (0, 49):
        earlier = q + (r + i) // blend.period
        within = int(samples[(r + i) % blend.period])
        assert of_later[i] == earlier * blend.shares[later[i]] + within


def test_decimal_weights_are_exact_and_long_periods_are_rounded():
    assert Blend([Fraction("0.7"), Fraction("0.3")]).shares == (7, 3)
    assert Blend([2, 4]).shares == (1, 2)
    sizes = [123_456_789, 987_654_321, 55_555]
    blend = Blend(sizes)
    assert blend.period == LONGEST_PERIOD
    for share, size in zip(blend.shares, sizes):
        assert abs(share / blend.period - size / sum(sizes)) <= 1 / LONGEST_PERIOD
    assert sum(Blend([1, 1, 131_070]).shares) == LONGEST_PERIOD + 1  # two sources of half a part each
    with pytest.raises(ValueError, match=r"weight 2 is 1e-06 of the sum of all: .*; leave it out"):
        Blend([Fraction("0.999999"), Fraction("0.000001")])
    with pytest.raises(ValueError, match="weights must be positive numbers, got"):
        Blend([1, 0])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A token directory of a's and b's, and a corpus of Megatron-LM of x's to z's."""
    folder, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(4)
    for i in range(30):
        letters = rng.choice(list("ab"), int(rng.integers(1, 60)))
        (folder / f"{i:02}.txt").write_text("".join(letters))
    texts = ["".join(rng.choice(list("xyz"), int(rng.integers(1, 90)))) for _ in range(25)]
    directory = build([f"{folder}/*.txt"], folder / "tokens", validation_fraction=0.2)
    return directory, write_megatron(folder / "megatron", texts_of_bytes(texts))


def blend_of(sources, *, weights=("0.7", "0.3"), **changes):
    blend = tuple(f"{weight} {path}" for weight, path in zip(weights, sources))
    options = {"seq_len": 16, "micro_batch_size": 4, "validation_fraction": 0.2, "document_masking": True}
    return open_dataset(DataConfig(blend=blend, **(options | changes)), cache_dir="unused")


def step_of(data, step, num_microbatches, dp_size):
    rows = [
        torch.cat([batch["tokens"], batch["targets"][:, -1:], batch["documents"].position_ids_BT], 1)
        for microbatch in range(num_microbatches)
        for rank in range(dp_size)
        for batch in [data.batch(step, microbatch, num_microbatches, rank, dp_size)]
    ]
    return sorted(torch.cat(rows).tolist())


@pytest.mark.parametrize("step", [0, 1, 977])
def test_the_global_batch_does_not_depend_on_the_layout(sources, step):
    expected = step_of(blend_of(sources, micro_batch_size=1), step, 8, 1)
    for micro_batch_size, num_microbatches, dp_size in ((8, 1, 1), (2, 2, 2), (1, 1, 8), (4, 1, 2)):
        data = blend_of(sources, micro_batch_size=micro_batch_size)
        assert step_of(data, step, num_microbatches, dp_size) == expected


def test_each_source_is_read_in_the_order_it_would_have_alone(sources):
    """And its documents are its own: end-of-text before each in the one, behind each in the other."""
    data = blend_of(sources)
    options = {"seq_len": 16, "micro_batch_size": 1, "seed": 1234, "document_masking": True}
    alone = [TokenDataset(path, **options, validation_fraction=0.2) for path in sources]
    seen = Counter()
    for step in range(30):
        batch = data.batch(step, 0, 1, 0, 1)
        for row in range(4):
            source = int(any(i in (120, 121, 122) for i in batch["tokens"][row].tolist()))
            own = alone[source].batch(seen[source], 0, 1, 0, 1)
            seen[source] += 1
            assert torch.equal(own["tokens"][0], batch["tokens"][row])
            assert torch.equal(own["targets"][0], batch["targets"][row])
            positions = batch["documents"].position_ids_BT[row]
            assert torch.equal(own["documents"].position_ids_BT[0], positions)
    assert seen == {0: 84, 1: 36}


def test_there_is_room_for_the_documents_of_any_batch(sources, tmp_path):
    blend = tuple(f"{weight} {path}" for weight, path in zip((1, 2), sources))
    config = DataConfig(blend=blend, seq_len=16, micro_batch_size=3, document_masking=True)
    data = open_dataset(config, cache_dir=tmp_path, static_shapes=True)
    assert data.max_documents == 3 * max(source.train.max_documents(16) for source in data.sources)
    for step in range(10):
        assert data.batch(step, 0, 1, 0, 1)["documents"].borders_n.shape == (data.max_documents + 1,)


def test_held_out_text_of_each_source(sources, tmp_path):
    data = blend_of(sources)
    held_out = data.held_out()
    assert [(name, share) for name, share, _ in held_out] == [(str(sources[0]), 0.7), (str(sources[1]), 0.3)]
    assert data.bytes_per_token is None  # of Megatron's files
    (tmp_path / "t.txt").write_text("c" * 900)
    none_held_out = build([str(tmp_path / "t.txt")], tmp_path / "d", validation_fraction=0)
    both = blend_of((sources[0], none_held_out))
    assert [(name, share) for name, share, _ in both.held_out()] == [(str(sources[0]), 1.0)]
    of_each = [source.bytes_per_token for source in both.sources]
    assert both.bytes_per_token == pytest.approx(0.7 * of_each[0] + 0.3 * of_each[1])
    with pytest.raises(ValueError, match="no text was held out"):
        blend_of((none_held_out,), weights=("1",)).held_out()


def test_sources_that_do_not_fit_each_other(sources, tmp_path):
    (tmp_path / "t.txt").write_text("some text of its own\n" * 40)
    other = build([str(tmp_path / "t.txt")], tmp_path / "d", tokenizer="bpe", vocab_size=270)
    with pytest.raises(ValueError, match=r"differ in tokenizer \(byte and bpe\): build them with the same"):
        blend_of((sources[0], other))
    one, two = (TokenDataset(sources[0], seq_len=n, micro_batch_size=1, seed=0) for n in (8, 9))
    with pytest.raises(ValueError, match="a has seq_len 8, b has 9"):
        BlendedDataset({"a": one, "b": two}, [1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blend": ("0.7 a", "b")}, "blend must have a weight before each path, .* got 'b'"),
        ({"blend": ("0 a",)}, "blend must have a weight before each path"),
        ({"blend": ("-1 a",)}, "blend must have a weight before each path"),
        ({"blend": ("1e400 a",)}, "blend must have a weight before each path"),
        ({"blend": ("nan a",)}, "blend must have a weight before each path"),
        ({"blend": ("1 ",)}, "blend must have a weight before each path"),
        ({"blend": ("1 a", "2 a")}, "blend must name each path once, got 'a' again"),
        ({"blend": ()}, "blend must name a source, got none"),
        ({"blend": ("1 a",), "path": "b"}, "blend and path exclude each other, got path 'b'"),
        ({"blend": ("1 a",), "validation_path": "b"}, "blend and validation_path exclude each other"),
    ],
)
def test_mistakes_in_a_blend(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes)


def test_the_commands_say_how_a_blend_is_read(sources, tmp_path, capsys):
    blend = [f"0.75 {sources[0]}", f"0.25 {sources[1]}"]
    assert main(["blend", *blend, "--tokens", "1e5", "--seq-len", "16"]) == 0
    out = capsys.readouterr().out
    assert "4 samples are a period; 100,000 tokens read" in out and "3 samples of a period, 75.0000%" in out
    times = 75_000 / TokenDataset(sources[0], seq_len=16, micro_batch_size=1, seed=0).train.info.num_tokens
    assert f"each {times:.3g} times" in out
    assert main(["blend", "one"]) == 2 and "must have a weight before each path" in capsys.readouterr().err
    for number in ("nan", "-1", "inf"):
        assert main(["blend", "1 one", "--tokens", number]) == 2
        assert f"--tokens must be a positive number, got {number}" in capsys.readouterr().err
    listed = ", ".join(f'"{entry}"' for entry in blend)
    (tmp_path / "r.toml").write_text(f"[data]\nblend = [{listed}]\nseq_len = 32\n[model]\nmax_seq_len = 32\n")
    assert plan([str(tmp_path / "r.toml"), "--world-size", "1"]) == 0
    assert f"data      75.00% {sources[0]}, 25.00% {sources[1]}" in capsys.readouterr().out
    assert expected_vocab_size(DataConfig(blend=(*blend[:1], "1 elsewhere"))) == 257


@pytest.mark.full
def test_a_run_on_a_blend_goes_on_where_it_was_and_evaluates_each_source(sources, tmp_path, capsys):
    def run(name, *more, **changes):
        options = arguments(tmp_path, "", name, **changes)
        place = options.index("--data.path")
        blend = ["--data.blend", f"0.7 {sources[0]}", f"0.3 {sources[1]}"]
        return [*options[:place], *blend, *options[place + 2 :], *more]  # no path, which a blend excludes

    assert train(run("whole")) == 0
    assert train(run("parts", train__steps=3)) == 0
    assert train(run("parts", "--resume", "auto")) == 0
    assert losses(tmp_path / "parts")[-3:] == losses(tmp_path / "whole")[-3:]
    record = [r for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "eval"][-1]
    first, second = record["source_losses"]
    assert record["loss"] == pytest.approx(0.7 * first + 0.3 * second)
    assert f"{sources[0]} {first:.4f}  {sources[1]} {second:.4f}" in capsys.readouterr().out
