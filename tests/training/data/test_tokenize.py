"""Tokenizers give text back, know what ends it, and name the file that they cannot be read from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizer_tools
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import exhaustive, full

from fastmp.apps.train_main import open_data
from fastmp.config.recipe import load_recipe
from fastmp.training.data.corpus import build
from fastmp.training.data.tokenfile import read_index
from fastmp.training.data.tokenize import (
    END_OF_TEXT,
    ByteTokenizer,
    load_tokenizer,
    train_bpe,
    unigram_entropy,
)

CONFIGS = Path(__file__).parents[3] / "configs"
CORPUS = [b"the cat sat on the mat, the end.\n" * 20, "naïve café — 日本語 😀\n".encode() * 20]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(CORPUS, 290)


@given(st.binary(max_size=300))
def test_byte_round_trip(data):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data)
    assert ids.dtype == np.int64 and tokenizer.decode_bytes(ids) == data


@settings(max_examples=200)
@given(
    text=st.text(max_size=200) | st.sampled_from([END_OF_TEXT, f"a{END_OF_TEXT}b", "the the the", "\r\n\t\0"])
)
def test_bpe_round_trip(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text and bpe.decode_bytes(ids) == text.encode()
    assert bpe.end_of_text not in ids  # text that spells the marker is text


@pytest.mark.parametrize("look_alike", [tokenizer_tools.albert, tokenizer_tools.bert])
def test_a_marker_that_is_in_the_vocabulary_is_text_where_text_spells_it(look_alike, tmp_path):
    """The unknown token alone stands for text, where parts of the marker are not known."""
    tokenizer = load_tokenizer(look_alike(tmp_path / "model"))
    markers = ["[MASK]", "[CLS]", "[SEP]", "</s>", "<pad>"]
    ids = {tokenizer.special_id(marker) for marker in markers} - {None}
    assert len(ids) >= 3 and tokenizer.end_of_text in ids
    text = "the cat " + "".join(markers) + " " + " ".join(markers) + " sat"
    assert ids.isdisjoint(tokenizer.encode(text).tolist())
    assert ids.isdisjoint(tokenizer.encode_places([text])[0][0].tolist())
    assert tokenizer.special_id("[MASK]") in tokenizer.encode_prompt("the [MASK] sat")
    assert (
        tokenizer.encode("the cat sat").tolist()
        == tokenizer.encode_prompt("the cat sat")[
            (begins := look_alike is tokenizer_tools.bert) : -1 if begins else None
        ]
    )


def test_bpe_is_deterministic_and_learns(bpe):
    again = train_bpe(iter(CORPUS), 290)
    assert again.to_json() == bpe.to_json()
    assert bpe.vocab_size == 290
    assert len(bpe.encode(CORPUS[0])) < len(CORPUS[0]) / 2


def test_prompts_begin_as_documents_in_token_files_do(bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        for text in ("", "the cat"):
            assert tokenizer.encode_prompt(text) == [tokenizer.end_of_text, *tokenizer.encode(text)]


def test_bpe_batch_is_one_by_one(bpe):
    for one, batched in zip(CORPUS, bpe.encode_batch(CORPUS)):
        assert np.array_equal(bpe.encode(one), batched)


def test_bpe_stops_where_the_text_has_no_more_pairs():
    assert 257 <= train_bpe([b"ab"], 5000).vocab_size < 300


def test_saved_tokenizer_loads_equal(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_json())
    loaded = load_tokenizer(path)
    text = "the naïve 日 cat"
    assert np.array_equal(loaded.encode(text), bpe.encode(text))
    assert (loaded.vocab_size, loaded.end_of_text) == (bpe.vocab_size, bpe.end_of_text)
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)


def test_end_of_text_stands_for_nothing(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        assert (
            tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_of_text, *tokenizer.encode("b")]) == "ab"
        )


def test_a_character_cut_in_two_is_shown_not_raised(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        half = [tokenizer.encode("é")[0]] if tokenizer.name == "byte" else [bpe.encode("\u07ff")[0]]
        assert tokenizer.decode(half) == "\ufffd"


@pytest.mark.parametrize("bad", (-1, 300, 10**12))
def test_an_id_beyond_the_vocabulary_is_named(bpe, bad):
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(ValueError, match=f"id {bad} is outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([bad])


def test_text_that_is_not_text_is_named(bpe):
    with pytest.raises(ValueError, match="not UTF-8 at byte 2"):
        bpe.encode(b"ab\xff")
    with pytest.raises(ValueError, match="half a surrogate pair at character 1"):
        ByteTokenizer().encode("a\ud800")


def test_vocabulary_too_small_for_bytes():
    with pytest.raises(ValueError, match=r"at least 257.*got 256"):
        train_bpe(CORPUS, 256)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.json"):
        load_tokenizer(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("look_alike", "end", "begins_with"),
    [
        (tokenizer_tools.gpt2, "<|endoftext|>", []),
        (tokenizer_tools.llama_3, "<|end_of_text|>", ["<|begin_of_text|>"]),
        (tokenizer_tools.qwen_3, "<|endoftext|>", []),
        (tokenizer_tools.mixtral, "</s>", ["<s>"]),
    ],
)
def test_a_models_directory_is_a_tokenizer(tmp_path, look_alike, end, begins_with):
    tokenizer = load_tokenizer(look_alike(tmp_path / "model"))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.end_of_text == library.token_to_id(end)
    assert tokenizer.vocab_size == library.get_vocab_size()
    for text in [*tokenizer_tools.TEXTS, "", f"{end}a{end}", "\x00\x7f\u07ff"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.end_of_text not in ids
        assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text
    ids = tokenizer.encode_prompt(f"the cat{end}")
    assert ids[:-1] == [*map(library.token_to_id, begins_with), *tokenizer.encode("the cat")]
    assert ids[-1] == tokenizer.end_of_text and tokenizer.end_of_text not in tokenizer.encode(end)


def test_what_a_tokenizer_changes_is_seen(tmp_path):
    """NFC joins an accent with its letter, ▁ is a space to Mixtral, and so the text is another one."""
    qwen = load_tokenizer(tokenizer_tools.qwen_3(tmp_path / "qwen"))
    assert qwen.decode(qwen.encode("e\u0301")) == "\xe9"
    assert qwen.decode(qwen.encode("<tool_3>")) == "<tool_3>"  # an added token that is text
    mixtral = load_tokenizer(tokenizer_tools.mixtral(tmp_path / "mixtral"))
    assert mixtral.decode(mixtral.encode("a\u2581b")) == "a b"


@pytest.mark.parametrize(
    ("name", "look_alike", "size"),
    [
        *full([("mixtral-8x7b", tokenizer_tools.mixtral, 32_000)]),
        *exhaustive(
            [
                ("llama-3-8b", tokenizer_tools.llama_3, 128_256),
                ("qwen3-30b-a3b", tokenizer_tools.qwen_3, 151_669),
            ]
        ),
    ],
)
def test_recipes_have_room_for_the_tokenizers_of_their_models(tmp_path, name, look_alike, size):
    directory = look_alike(tmp_path / "model", full_size=True)
    (tmp_path / "text.txt").write_text("\n".join(tokenizer_tools.TEXTS) * 20)
    data = build([str(tmp_path / "text.txt")], tmp_path / "data", tokenizer=str(directory))
    recipe = load_recipe(CONFIGS / f"{name}.toml")
    assert read_index(data).vocab_size == size <= recipe.model.vocab_size
    assert read_index(data).splits["train"].num_changed == 0
    recipe = replace(
        recipe,
        data=replace(recipe.data, path=str(data), seq_len=16),
        train=replace(recipe.train, eval_interval=0),
    )
    runtime = SimpleNamespace(local_rank=0, world_size=1)
    assert open_data(recipe, runtime).tokenizer.end_of_text == load_tokenizer(directory).end_of_text
    smaller = replace(recipe, model=replace(recipe.model, vocab_size=size - 1))
    with pytest.raises(ValueError, match=rf"vocabulary of {size} tokens, model.vocab_size is {size - 1}"):
        open_data(smaller, runtime)


def test_who_says_what_ends_a_text(tmp_path, bpe):
    """The option, then each file beside, then the usual names."""
    description = json.loads(bpe.to_json())
    names = ["<eos>", "[A]", "[B]", "[C]", "[D]", "[E]"]
    first = len(description["model"]["vocab"])
    added = description["added_tokens"][0]
    description["added_tokens"] += [
        {**added, "id": first + i, "content": name} for i, name in enumerate(names)
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    ids = {name: first + i for i, name in enumerate(names)}
    assert load_tokenizer(path).end_of_text == bpe.end_of_text  # the first of the usual names
    for wanted, name, said in (
        ("[B]", "config", {"eos_token_id": [ids["[B]"], 0]}),
        ("[C]", "generation_config", {"eos_token_id": ids["[C]"]}),
        ("[D]", "special_tokens_map", {"eos_token": {"content": "[D]"}}),
        ("[E]", "tokenizer_config", {"eos_token": "[E]"}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(said))
        assert load_tokenizer(path).end_of_text == ids[wanted]
    assert load_tokenizer(tmp_path, end_of_text="[A]").end_of_text == ids["[A]"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON"),
        ("tokenizer_config.json", '{"eos_token": "[X]"}', r"tokenizer\.json: no token '\[X\]': name the one"),
        ("config.json", '{"eos_token_id": 10000000000}', r"tokenizer\.json: no token has the id 10000000000"),
    ],
)
def test_a_broken_file_beside_is_named(tmp_path, bpe, name, content, said):
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        load_tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no tokenizer\.json; transformers makes one: AutoTokenizer"):
        load_tokenizer(tmp_path)


def test_merges_are_not_dropped_at_random(tmp_path, bpe):
    path = tmp_path / "tokenizer.json"
    description = json.loads(bpe.to_json())
    description["model"]["dropout"] = 0.5
    path.write_text(json.dumps(description))
    assert np.array_equal(load_tokenizer(path).encode(CORPUS[0]), bpe.encode(CORPUS[0]))


def drop_marker(description):
    description["added_tokens"].clear()
    description["model"]["vocab"].pop(END_OF_TEXT)


def template_id(description, number):
    for token in description["post_processor"]["special_tokens"].values():
        token["ids"] = [number]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["model"].update(type="Neural"), "Neural|variant"),
        (lambda d: d.pop("model"), "not a tokenizer"),
        (lambda d: d["model"]["vocab"].update(far=4_000_000_000), "'far' has the id 4000000000"),
        (lambda d: d["added_tokens"].append({"id": 2**32 - 1, "content": "x"}), "'x' has the id 4294967295"),
        (lambda d: d["model"].update(continuing_subword_prefix="\0"), "lacks the continuing_subword_prefix"),
        (lambda d: template_id(d, 2**32 - 1), "post_processor gives id 4294967295 for a vocabulary of"),
        (drop_marker, "no token is called <|endoftext|>.*--end-of-text TOKEN".replace("|", r"\|")),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_file_name(bpe, tmp_path, change, named):
    description = json.loads(bpe.to_json())
    change(description)
    path = tmp_path / "strange.json"
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=rf"strange\.json.*({named})"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA/////w=="}),  # panics
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(.+)+\\1x"}, "behavior": "Isolated", "invert": False},
        ),
    ],
)
def test_a_tokenizer_whose_parts_fail_on_text_is_named(bpe, tmp_path, part, value):
    path = tmp_path / "strange.json"
    path.write_text(json.dumps({**json.loads(bpe.to_json()), part: value}))
    with pytest.raises(ValueError, match=r"strange\.json: "):
        load_tokenizer(path).encode("A line of text, and numbers, " * 9)


@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_tokenizer_file_loads_right_or_raises_value_error(bpe, tmp_path_factory, data):
    raw = bytearray(bpe.to_json().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(raw)
    try:
        loaded = load_tokenizer(path)
    except ValueError as error:
        assert "damaged.json" in str(error)
    else:  # still a tokenizer, then
        assert 0 <= loaded.end_of_text < loaded.vocab_size


def test_entropy_against_known_distributions():
    assert unigram_entropy(np.bincount([0, 1, 2, 3])) == pytest.approx(np.log(4))
    assert unigram_entropy(np.array([7])) == 0.0 and unigram_entropy(np.array([], np.int64)) == 0.0
    assert unigram_entropy(np.array([1, 3])) == pytest.approx(0.25 * np.log(4) + 0.75 * np.log(4 / 3))
