"""Masked samples: what one is, that epochs cover the text, layouts, held-out text, tiny documents, damage."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tokenizer_tools
import torch
from megatron_tools import texts_of_bytes, write_megatron

from fastmp.config import DataConfig, MaskedLMConfig
from fastmp.training.data.blend import open_dataset
from fastmp.training.data.corpus import build
from fastmp.training.data.dataset import IGNORE_INDEX, TokenDataset
from fastmp.training.data.masked import MaskedDataset
from fastmp.training.data.masking import budgets
from fastmp.training.data.tokenize import ByteTokenizer
from fastmp.training.data.words import WordTable

NOUNS = "cat dog house river stone computation parallelism".split()
VERBS = "sees finds measures holds".split()


def make_text(seed, sentences):
    draw = random.Random(seed)
    text = ""
    for _ in range(sentences):
        adverb = draw.choice(["", " today", " (as said)", " very quickly"])
        text += f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} a {draw.choice(NOUNS)}{adverb}."
        text += draw.choice([" ", " ", "\n", "\n\n"])
    return text


TEXTS = [make_text(seed, 1 + seed % 17) for seed in range(40)] + ["x", "no", "One sentence alone"]
KINDS = ["byte", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("bpe", "bert", "albert"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def directory(request, folder, tmp_path_factory):
    out, tokenizer = tmp_path_factory.mktemp("data"), request.param
    if tokenizer in ("bert", "albert"):
        tokenizer = str(getattr(tokenizer_tools, tokenizer)(out / "tokenizer", TEXTS, 75))
    options = {"vocab_size": 300} if tokenizer == "bpe" else {}
    return build([f"{folder}/*.txt"], out / "d", tokenizer=tokenizer, validation_fraction=0.1, **options)


@pytest.fixture(scope="module")
def of_bytes(folder, tmp_path_factory):
    return build([f"{folder}/*.txt"], tmp_path_factory.mktemp("bytes") / "d", validation_fraction=0.1)


def dataset(directory, *, seq_len=64, micro_batch_size=4, seed=5, **masking):
    options = {"seq_len": seq_len, "micro_batch_size": micro_batch_size, "seed": seed}
    return MaskedDataset(directory, **options, masking=MaskedLMConfig(**masking))


def documents_of(data, split):
    return [
        split.read(begin, begin + length).tolist()
        for begin, length in zip(*map(np.ndarray.tolist, split.texts(np.arange(split.info.num_documents))))
    ]


def rows(batches):
    for batch in batches:
        for row in range(len(batch["tokens"])):
            yield {name: tensor[row].numpy() for name, tensor in batch.items()}


def epochs(data, count=1):
    """The rows of the first epochs, a list of each."""
    size = data.num_samples
    steps = -(-count * size // data.micro_batch_size)
    found = list(rows(data.batch(step, 0, 1, 0, 1) for step in range(steps)))
    return [found[number * size : (number + 1) * size] for number in range(count)]


def restored(row):
    """The tokens of a row before any was masked."""
    return np.where(row["targets"] == IGNORE_INDEX, row["tokens"], row["targets"])


def halves(data, row):
    """The text of A and of B; what is around them is checked."""
    tokens, special = restored(row).tolist(), data.special
    size = row["padding_mask"].tolist().index(True) if row["padding_mask"].any() else len(tokens)
    assert row["padding_mask"].tolist() == [False] * size + [True] * (len(tokens) - size)
    assert tokens[size:] == [special.pad] * (len(tokens) - size)
    assert tokens[0] == special.cls and tokens[size - 1] == special.sep
    first = row["token_types"].tolist().index(1) - 1
    assert row["token_types"].tolist() == [0] * (first + 1) + [1] * (size - first - 1) + [0] * (
        len(tokens) - size
    )
    assert tokens[first] == special.sep
    return tokens[1:first], tokens[first + 1 : size - 1]


def find(part, documents):
    """(document, place) where `part` stands, any of several."""
    text = ",".join(map(str, part)) + ","
    for number, document in enumerate(documents):
        place = ("," + ",".join(map(str, document)) + ",").find("," + text)
        if place >= 0:
            return number, ",".join(map(str, document))[:place].count(",")
    raise AssertionError(f"{part} is in no document")


def test_a_sample_is_two_segments_of_a_document_with_whole_words_masked(directory):
    data = dataset(directory)
    documents, pieces = documents_of(data, data.train), data.tokenizer.pieces()
    table = WordTable(pieces)
    orders, masked, known, inside = [], 0, 0, 0
    special = [*vars(data.special).values(), data.tokenizer.end_of_text]
    for row in epochs(data)[0]:
        first, second = halves(data, row)
        assert first and second
        find(second + first if row["sentence_order"] else first + second, documents)
        orders.append(int(row["sentence_order"]))
        chosen = row["targets"] != IGNORE_INDEX
        assert not np.isin(row["targets"][chosen], special).any()
        count, budget = chosen.sum(), int(budgets(np.array(len(first + second)), 0.15))
        assert 1 <= count <= budget <= data.max_masked
        for begin, segment in ((1, first), (2 + len(first), second)):
            words = np.cumsum(table.starts(np.array([segment]))[0][0])
            of_segment = chosen[begin : begin + len(segment)]
            for word in np.unique(words[of_segment]):
                if (words == word).sum() <= budget:
                    assert of_segment[words == word].all()
            for place, token in enumerate(segment[1:], 1):
                if pieces[token].goes_on and (words == words[place]).sum() <= budget:
                    assert of_segment[place] == of_segment[place - 1]
                    inside += 1
        masked += count
        known += len(first + second)
        changed = row["tokens"] != restored(row)
        assert not (changed & ~chosen).any()
    assert 0.11 < masked / known <= 0.16  # words that do not fit are left; of bytes, these are long
    assert 0.3 < np.mean(orders) < 0.7
    assert (inside > 500) == (data.tokenizer.name == "wordpiece")


@pytest.mark.full
def test_an_epoch_has_all_text_and_the_next_one_other_masks(directory):
    data = dataset(directory, seq_len=32, short_fraction=0.0)
    documents = [document for document in documents_of(data, data.train) if len(document) > 1]
    masks = []
    for samples in epochs(data, 2):
        seen = [np.zeros(len(document), bool) for document in documents]
        for row in samples:
            first, second = halves(data, row)
            text = second + first if row["sentence_order"] else first + second
            for document, covered in zip(documents, seen):  # all places where it stands
                for place in range(len(document) - len(text) + 1):
                    if document[place] == text[0] and document[place : place + len(text)] == text:
                        covered[place : place + len(text)] = True
        assert all(covered.all() for covered in seen)
        masks.append({(tuple(row["tokens"]), tuple(row["targets"])) for row in samples})
    assert len(masks[0]) >= data.num_samples - 2 and len(masks[0] & masks[1]) < data.num_samples // 20


def step_of(data, step, dp_size, num_microbatches):
    batches = [
        data.batch(step, microbatch, num_microbatches, rank, dp_size)
        for microbatch in range(num_microbatches)
        for rank in range(dp_size)
    ]
    return sorted(
        tuple((name, tuple(np.atleast_1d(value).tolist())) for name, value in row.items())
        for row in rows(batches)
    )


@pytest.mark.parametrize(
    ("dp_size", "num_microbatches", "size"), [(2, 4, 1), (4, 1, 2), (1, 1, 8), (8, 1, 1)]
)
def test_the_global_batch_does_not_depend_on_the_layout_or_on_what_was_read(
    of_bytes, dp_size, num_microbatches, size
):
    alone, divided = dataset(of_bytes, micro_batch_size=1), dataset(of_bytes, micro_batch_size=size)
    for step in (40, 3, 0):
        expected = step_of(alone, step, 1, 8)
        assert step_of(divided, step, dp_size, num_microbatches) == expected
    assert step_of(dataset(of_bytes, micro_batch_size=1, seed=6), 0, 1, 8) != expected


def test_batches_leave_every_generator_alone(of_bytes):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    batch = dataset(of_bytes).batch(3, 0, 1, 0, 1)
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}
    long = ((4, 64), torch.int64)
    assert shapes == {
        "tokens": long,
        "targets": long,
        "token_types": long,
        "padding_mask": ((4, 64), torch.bool),
        "sentence_order": ((4,), torch.int64),
    }


@pytest.mark.parametrize("dp_size", [1, 3])
def test_held_out_samples_are_all_there_once_and_at_every_call_the_same(directory, dp_size):
    data = dataset(directory, seq_len=32, short_fraction=0.0)
    documents = documents_of(data, data.validation)
    ranks = [list(data.validation_batches(rank, dp_size)) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {data.num_validation_batches(dp_size)}
    found, empty = [], 0
    for row in (row for batches in zip(*ranks) for row in rows(batches)):
        if row["sentence_order"] < 0:
            empty += 1
            assert (row["targets"] == IGNORE_INDEX).all() and row["padding_mask"][3:].all()
            assert row["tokens"][:3].tolist() == [data.special.cls, data.special.sep, data.special.sep]
            continue
        first, second = halves(data, row)
        found.append(find(second + first if row["sentence_order"] else first + second, documents))
    assert len(found) + empty == data.num_validation_batches(dp_size) * dp_size * 4
    assert empty < 4 * dp_size and {number for number, _ in found} >= {
        number
        for number, document in enumerate(documents)
        if len(document) > 1 and documents.count(document) == 1
    }
    again = list(data.validation_batches(0, dp_size, max_batches=2))
    for one, other in zip(again, ranks[0]):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_special_tokens_are_the_tokenizers_or_stand_behind_its_vocabulary(directory):
    data = dataset(directory)
    size, special = data.tokenizer.vocab_size, data.special
    if data.tokenizer.name in ("wordpiece", "unigram"):
        assert data.vocab_size == size and data.tokenizer.special_id("[MASK]") == special.mask
        assert data.tokenizer.special_id("[PAD]", "<pad>") == special.pad
    else:
        assert [special.cls, special.sep, special.mask, special.pad] == [size, size + 1, size + 2, size + 3]
        assert data.vocab_size == size + 4
    batch = data.batch(0, 0, 1, 0, 1)
    assert batch["tokens"].max() < data.vocab_size


def write(folder, *texts):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    return build([f"{folder}/*.txt"], folder / "tokens", validation_fraction=0.0)


def test_tiny_documents(tmp_path):
    """Of one token there is no sample; of one sentence, one cut between words; of one word, within it."""
    data = dataset(write(tmp_path / "a", "x", "no", "One sentence alone", "y"), seq_len=24)
    assert data.num_samples == 2
    found = set()
    for row in (row for samples in epochs(data, 8) for row in samples):
        first, second = (data.tokenizer.decode(half) for half in halves(data, row))
        found.add((first, second) if row["sentence_order"] == 0 else (second, first))
    assert found <= {("n", "o"), ("One", " sentence alone"), ("One sentence", " alone")} | {
        pair for pair in found if len("".join(pair)) < 18
    }
    assert ("n", "o") in found and len(found) > 2
    with pytest.raises(ValueError, match=r"train\.bin: no document has two tokens"):
        dataset(write(tmp_path / "b", "x", "y"))


@pytest.mark.full
def test_samples_are_shorter_by_chance_only_where_that_is_wanted(of_bytes):
    def lengths(share):
        data = dataset(of_bytes, short_fraction=share)
        batches = (data.batch(step, 0, 1, 0, 1) for step in range(150))
        return np.concatenate([(~batch["padding_mask"]).sum(1).numpy() for batch in batches])

    never, always = lengths(0.0), lengths(1.0)
    assert np.mean(never > 64 - 64 // 8) > 0.8 > 0.3 > np.mean(always > 64 - 64 // 8)
    assert always.min() < 12 and np.mean(lengths(0.1) < 40) < np.mean(never < 40) + 0.12


def test_megatrons_files_give_the_same_samples(tmp_path):
    """In the order of the directory's documents; with end-of-text behind each, or with none."""
    directory = write(tmp_path / "texts", *TEXTS)
    data = dataset(directory)
    texts = [ByteTokenizer().decode(document) for document in documents_of(data, data.train)]
    for end in (256, None):
        prefix = write_megatron(tmp_path / f"end-{end}", texts_of_bytes(texts, end=end))
        options = {"seq_len": 64, "micro_batch_size": 4, "seed": 5, "validation_fraction": 0.0}
        other = MaskedDataset(prefix, **options)
        for step in (0, 7):
            expected, found = data.batch(step, 0, 1, 0, 1), other.batch(step, 0, 1, 0, 1)
            assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_damage_is_named(of_bytes, tmp_path, folder):
    copy = build([f"{folder}/*.txt"], tmp_path / "d", validation_fraction=0.0)
    path = copy / "train.documents"
    offsets = np.fromfile(path, "<i8")
    for place, value in ((5, offsets[4]), (5, offsets[-1] + 7), (7, -3)):
        damaged = offsets.copy()
        damaged[place] = value
        damaged.tofile(path)
        with pytest.raises(ValueError, match=r"train\.documents: damaged: document \d+ is said to be of"):
            dataset(copy)
    offsets.tofile(path)
    tokens = np.fromfile(copy / "train.bin", "<u2")
    tokens[100] ^= 4
    tokens.tofile(copy / "train.bin")
    with pytest.raises(ValueError, match=r"train\.bin: damaged: block 0"):
        dataset(copy).batch(0, 0, 1, 0, 1)
    with pytest.raises(ValueError, match="no text was held out"):
        dataset(copy).num_validation_batches()


def test_open_dataset_gives_what_the_configuration_asks_for(tmp_path, of_bytes):
    config = DataConfig(path=str(of_bytes), seq_len=32, micro_batch_size=2)
    assert type(open_dataset(config, cache_dir=tmp_path)) is TokenDataset
    masking = MaskedLMConfig(mask_fraction=0.3, max_ngram=1)
    masked = DataConfig(path=str(of_bytes), seq_len=32, micro_batch_size=2, masked_lm=masking)
    data = open_dataset(masked, cache_dir=tmp_path, static_shapes=True)
    assert isinstance(data, MaskedDataset) and data.masking is masking and data.max_masked == 9
    assert data.num_samples == MaskedDataset.from_config(masked, cache_dir=tmp_path).num_samples


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (DataConfig, {"document_masking": True}, "document_masking and masked_lm exclude each other"),
        (DataConfig, {"seq_len": 4}, "seq_len must be 5 or more with masked_lm.*got 4"),
        (MaskedLMConfig, {"mask_fraction": 0.0}, "mask_fraction must be above 0"),
        (MaskedLMConfig, {"mask_fraction": 0.6}, r"at most 0\.5, got 0\.6"),
        (MaskedLMConfig, {"max_ngram": 0}, "max_ngram must be positive, got 0"),
        (MaskedLMConfig, {"short_fraction": 1.5}, r"short_fraction must be from 0 to 1, got 1\.5"),
    ],
)
def test_configurations_that_do_not_fit_are_named(config, options, named):
    masked = {"masked_lm": MaskedLMConfig()} if config is DataConfig else {}
    with pytest.raises(ValueError, match=named):
        config(**options, **masked)


def test_arguments_that_do_not_fit_are_named(of_bytes):
    with pytest.raises(ValueError, match="seq_len 4 must be 5 or more"):
        dataset(of_bytes, seq_len=4)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        dataset(of_bytes).batch(0, 0, 1, 2, 2)
