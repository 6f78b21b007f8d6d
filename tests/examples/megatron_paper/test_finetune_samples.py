"""Examples as rows of token ids: what is cut, where answers are, and the order in which a run sees them."""

from __future__ import annotations

import numpy as np
import pytest
from finetune_tokenizer import word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.megatron_paper.finetuning.formats import Answer, MultipleChoice, Pair, Question
from examples.megatron_paper.finetuning.samples import IGNORE_LABEL, Sample, TaskData, TokenPair, encode
from examples.megatron_paper.finetuning.windows import place_of
from fastmp.training.data.masked import SpecialTokens
from fastmp.training.data.tokenize import ByteTokenizer

SPECIAL = SpecialTokens(cls=300, sep=301, mask=303, pad=302)
BYTES = ByteTokenizer()


def encoded(examples, seq_len, *, stride=4, training=True, tokenizer=BYTES):
    return encode(examples, tokenizer, seq_len=seq_len, stride=stride, training=training)


def text(ids):
    return bytes(ids.tolist()).decode()


@settings(max_examples=40)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(2, 20))
def test_pairs_lose_the_ends_of_the_longer_text_first(first, second, room):
    (sample,) = encoded([Pair("a" * first, "b" * second, 1)], room + 3).samples
    kept = [first, second]
    while sum(kept) > room:
        kept[0 if kept[0] > kept[1] else 1] -= 1
    assert [len(each) for each in sample.rows[0]] == kept and sample.labels == (1,)


def test_an_option_goes_into_the_gap_or_behind_the_question():
    choices = [
        MultipleChoice("high", "An article.", "It is __ here.", ("1", "2", r"\1", "_"), 2),
        MultipleChoice("high", "An article.", "Which?", ("1", "2", "3", "4"), 0),
    ]
    gap, behind = encoded(choices, 64).samples
    assert [text(row.first) for row in gap.rows][1:] == ["It is 2 here.", r"It is \1 here.", "It is _ here."]
    assert [text(row.first) for row in behind.rows] == ["Which? 1", "Which? 2", "Which? 3", "Which? 4"]
    assert {text(row.second) for row in gap.rows} == {"An article."} and gap.labels == (2,)


def test_options_are_cut_before_the_article_is_left_out():
    (sample,) = encoded([MultipleChoice("high", "x" * 500, "y" * 300, ("a", "b", "c", "d"), 1)], 203).samples
    assert [(len(row.first), len(row.second)) for row in sample.rows] == [(128, 72)] * 4
    (sample,) = encoded([MultipleChoice("high", "x", "y" * 300, ("a", "b", "c", "d"), 1)], 23).samples
    assert [(len(row.first), len(row.second)) for row in sample.rows] == [(20, 0)] * 4


def rows_of(samples):
    data = TaskData(
        samples, samples, special=SPECIAL, seq_len=24, micro_batch_size=len(samples), batch_size=len(samples),
        epochs=1, seed=0,
    )  # fmt: skip
    (batch,) = data.validation_batches()
    return batch


def test_the_answer_is_in_the_windows_that_hold_all_of_it():
    """Rows of 24 tokens: 3 special ones, 4 of the question, and windows of 17 of 40, every 4."""
    context = "".join(chr(ord("a") + i % 26) for i in range(40))
    question = Question("1", "why?", context, (Answer(context[18:22], 18),))
    samples, windows, left_out = vars(encoded([question], 24)).values()
    assert left_out == 0 and [window.tokens.start for window in windows] == [0, 4, 8, 12, 16, 20, 24]
    batch = rows_of(samples)
    for sample, window, row in zip(samples, windows, batch["tokens"].tolist(), strict=True):
        whole = window.tokens.start <= 18 and 22 <= window.tokens.stop
        assert (sample.labels != (0, 0)) == whole
        if whole:
            first, last = sample.labels
            assert bytes(row[first : last + 1]).decode() == "stuv"
            assert place_of(
                window.places, *(label - window.ahead + window.tokens.start for label in sample.labels)
            ) == (18, 22)
        assert (
            bytes(row[window.ahead : window.ahead + len(window.tokens)]).decode()
            == context[window.tokens.start : window.tokens.stop]
        )
    owned = sum(window.begins.sum() for window in windows)
    assert owned == 40  # every token may begin an answer, in one window


def test_questions_without_an_answer_and_without_a_place_for_it():
    impossible = Question("1", "why?", "because", ())
    elsewhere = Question("2", "why?", "because", (Answer("cause", 0),))
    training = encoded([impossible, elsewhere], 24)
    assert [sample.labels for sample in training.samples] == [(0, 0)] and training.left_out == 1
    dev = encoded([impossible, elsewhere], 24, training=False)
    assert [window.question for window in dev.windows] == [0, 1] and dev.left_out == 0


def test_an_empty_context_has_a_window_and_no_place_for_an_answer():
    (window,) = encoded([Question("1", "why?", "", ())], 24, training=False).windows
    assert len(window.tokens) == 0 and not window.begins.any()


def test_places_are_those_of_the_text_as_it_was_given():
    """WordPiece puts all in lower case and takes accents off; bytes are several to a character."""
    tokenizer = word_tokenizer(["the", "cafe", "is", "red"])
    ((ids, places),) = tokenizer.encode_places(["The  Café\u2028is RED"])
    assert [ids.tolist(), places] == [[4, 5, 6, 7], [(0, 3), (5, 9), (10, 12), (13, 16)]]
    ((ids, places),) = BYTES.encode_places(["aé"])
    assert (ids.tolist(), places) == ([97, 195, 169], [(0, 1), (1, 2), (1, 2)])
    question = Question("1", "red", "The  Café is RED", (Answer("Café is", 5),))
    (sample,) = encoded([question], 16, tokenizer=tokenizer).samples
    assert sample.labels == (4, 5) and sample.rows[0].second.tolist() == [4, 5, 6, 7]


def test_rows_are_laid_out_as_bert_has_them():
    one = Sample((TokenPair(np.array([1, 2], np.int32), np.array([3], np.int32)),), (2,))
    data = TaskData(
        [one], [one], special=SPECIAL, seq_len=8, micro_batch_size=2, batch_size=2, epochs=1, seed=0
    )
    (batch,) = data.validation_batches()
    assert batch["tokens"].tolist()[0] == [300, 1, 2, 301, 3, 301, 302, 302]
    assert batch["token_types"].tolist()[0] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert batch["padding_mask"].tolist()[0] == [False] * 6 + [True] * 2
    assert batch["labels"].tolist() == [[2], [IGNORE_LABEL]]  # the second only fills the batch


def counted(number, **changes):
    samples = [
        Sample((TokenPair(np.array([i], np.int32), np.empty(0, np.int32)),), (i,)) for i in range(number)
    ]
    options = {"seq_len": 5, "micro_batch_size": 2, "batch_size": 4, "epochs": 3, "seed": 7, **changes}
    return TaskData(samples, samples, special=SPECIAL, **options)


def labels(data, step, *, dp_size=1):
    microbatches = data.batch_size // (data.micro_batch_size * dp_size)
    batches = [
        data.batch(step, microbatch, microbatches, rank, dp_size)
        for microbatch in range(microbatches)
        for rank in range(dp_size)
    ]
    return [int(label) for batch in batches for label in batch["labels"]]


def test_an_epoch_has_every_sample_once_and_the_last_step_is_filled_up():
    data = counted(10)
    assert data.steps == 8
    seen = [label for step in range(data.steps) for label in labels(data, step)]
    epochs = [seen[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and seen[30:] == [IGNORE_LABEL] * 2
    assert [data.epochs_done(step) for step in (0, 2, 3, 5, 7, 8)] == [0, 0, 1, 2, 2, 3]


def test_a_step_has_the_same_samples_at_any_number_of_ranks_and_others_with_another_seed():
    data = counted(10)
    for step in range(data.steps):
        assert labels(data, step) == labels(data, step, dp_size=2)
    assert labels(data, 0) != labels(counted(10, seed=8), 0)


def test_the_development_set_is_read_once_over_the_ranks_together():
    data = counted(7)
    found = [
        [batch["labels"].flatten().tolist() for batch in data.validation_batches(rank, 2)] for rank in (0, 1)
    ]
    assert found == [[[0, 1], [4, 5]], [[2, 3], [6, IGNORE_LABEL]]]
    assert len(list(data.validation_batches(0, 2, max_batches=1))) == 1


def test_rows_need_room():
    with pytest.raises(ValueError, match="seq_len 4 has no room for 3 special tokens and two texts"):
        encoded([Pair("a", "b", 0)], 4)
