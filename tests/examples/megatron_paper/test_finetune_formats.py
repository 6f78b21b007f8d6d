"""The readers of public files: what they take, what they leave out, and what they refuse in one line."""

from __future__ import annotations

import json

import pytest
from finetune_files import MNLI_COLUMNS, QQP_COLUMNS, mnli, qqp, race, squad, write_tsv

from examples.megatron_paper.finetuning.formats import (
    Answer,
    MultipleChoice,
    Pair,
    read_mnli,
    read_qqp,
    read_race,
    read_squad1,
    read_squad2,
)


def test_the_published_layouts_are_read(tmp_path):
    """MNLI has 12 columns in train.tsv and 16 in dev_*.tsv; names say which is which."""
    folder = mnli(tmp_path / "mnli", train=6, dev=3)
    train, dev = (read_mnli(folder / f"{name}.tsv").examples for name in ("train", "dev_matched"))
    assert len(train) == 6 and [pair.label for pair in dev] == [0, 1, 2]
    assert train[1].second.startswith("maybe the ")
    pairs = read_qqp(qqp(tmp_path / "qqp", train=4) / "train.tsv").examples
    assert [pair.label for pair in pairs] == [0, 1, 0, 1]
    first, *_, last = read_race(race(tmp_path / "race", train=24) / "train").examples
    assert (first.group, last.group, last.options[last.label][:4]) == ("middle", "high", "true")
    questions = read_squad2(squad(tmp_path / "squad", "2.0", train=6) / "train-v2.0.json").examples
    assert [bool(question.answers) for question in questions] == [False, True, True] * 2
    assert all(question.answer == question.answers[0] for question in questions if question.answers)


def test_a_quotation_mark_is_a_character_and_only_a_newline_ends_a_line(tmp_path):
    rows = [
        [1, 1, 2, '"Why', 'not?"', 0],
        [2, 3, 4, "one\u2028line", "two\x85parts\x0b", 1],
        [3, 5, 6, "carriage\rreturn", '""', 1],
    ]
    path = write_tsv(tmp_path / "train.tsv", QQP_COLUMNS, rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\t1\n", b"\t1\r\n"))
    assert read_qqp(path).examples == [
        Pair('"Why', 'not?"', 0),
        Pair("one\u2028line", "two\x85parts\x0b", 1),
        Pair("carriage\rreturn", '""', 1),
    ]


def test_broken_lines_are_left_out_and_counted(tmp_path):
    rows = [[i, 1, 2, "why", "how", i % 2] for i in range(300)]
    rows[7] = [7, 1, 2, "a\tb", "how", 0]
    rows[9] = [9, 1, 2, "half a line"]
    rows[11] = [11, 1, 2, " ", "how", 1]
    found = read_qqp(write_tsv(tmp_path / "dev.tsv", QQP_COLUMNS, rows))
    assert len(found.examples) == 297
    assert found.notes() == (
        "left out: 2 of another number of columns, 1 with an empty text; the first at line 9"
    )
    rows[13] = [13, 1, 2, "why", "how", "yes"]
    path = write_tsv(tmp_path / "dev.tsv", QQP_COLUMNS, rows)
    with pytest.raises(
        ValueError, match=r"dev.tsv: 4 of 300 lines cannot be used; the first, line 9, is one of"
    ):
        read_qqp(path)


def test_pairs_that_people_did_not_agree_on_are_left_out_however_many(tmp_path):
    folder = mnli(tmp_path, dev=6)
    path = folder / "dev_matched.tsv"
    path.write_text(path.read_text().replace("neutral\n", "-\n"))
    found = read_mnli(path)
    assert [pair.label for pair in found.examples] == [0, 2, 0, 2]
    assert found.left_out == {"without a gold label": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "does not name the column sentence1; it has ['']"),
        ("sentence1\tsentence2\n", "does not name the column gold_label"),
        ("\t".join((*MNLI_COLUMNS, "gold_label")) + "\n", "has no line that can be used"),
        (
            "sentence1\tsentence2\tgold_label\na\tb\tyes\nc\td\tno\n",
            "2 of 2 lines cannot be used; the first, line 2",
        ),
        (b"sentence1\tsentence2\tgold_label\n\xff\tb\tneutral\n", "line 2 is not UTF-8 at byte 0"),
        ("a" * (1 << 20), "line 1 has more than 1048576 bytes"),
    ],
)
def test_another_table_is_refused(tmp_path, content, message):
    path = tmp_path / "train.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        read_mnli(path)
    assert message in str(error.value) and str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def squad_file(path, **changes):
    entry = {"id": "q", "question": "who?", "answers": [{"text": "Ann", "answer_start": 4}], **changes}
    content = {"data": [{"title": "t", "paragraphs": [{"context": "The Ann.", "qas": [entry]}]}]}
    path.write_text(json.dumps(content))
    return path


def test_an_answer_must_stand_in_the_context_to_be_trained_on(tmp_path):
    elsewhere = {"text": "ann", "answer_start": 4}
    right = {"text": "The", "answer_start": 0}
    (question,) = read_squad1(squad_file(tmp_path / "a.json", answers=[elsewhere, right])).examples
    assert question.answer == Answer("The", 0) and len(question.answers) == 2
    (question,) = read_squad1(squad_file(tmp_path / "a.json", answers=[elsewhere])).examples
    assert question.answer is None
    (question,) = read_squad1(
        squad_file(tmp_path / "a.json", answers=[{"text": "n", "answer_start": -3}])
    ).examples
    assert question.answer is None


@pytest.mark.parametrize(
    ("read", "changes", "message"),
    [
        (read_squad1, {"is_impossible": True, "answers": []}, "a file of SQuAD 2.0, which squad2 reads"),
        (read_squad2, {}, "a file of SQuAD 1.1, which squad1 reads"),
        (read_squad2, {"is_impossible": 1.5}, "is_impossible must be true or false, got 1.5"),
        (read_squad1, {"answers": {}}, "data[0].paragraphs[0].qas[0]: answers must be a list, got {}"),
        (read_squad1, {"answers": [7]}, "qas[0].answers[0]: must be an object, got 7"),
        (read_squad1, {"answers": [{"text": "Ann"}]}, "answer_start must be a whole number, got None"),
        (read_squad1, {"id": 5}, "qas[0]: id must be a text, got 5"),
        (read_squad1, {"question": None}, "qas[0]: question must be a text, got None"),
    ],
)
def test_another_json_is_refused(tmp_path, read, changes, message):
    path = squad_file(tmp_path / "file.json", **changes)
    with pytest.raises(ValueError) as error:
        read(path)
    assert message in str(error.value) and str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object, got []"),
        (b"{}", "data must be a list, got None"),
        (b'{"data": [{"paragraphs": []}]}', "has no question that can be used"),
    ],
)
def test_what_is_no_squad_file_is_refused(tmp_path, content, message):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_squad1(path)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_squad1(tmp_path)


def test_two_questions_of_one_id_are_refused(tmp_path):
    path = squad_file(tmp_path / "file.json")
    content = json.loads(path.read_text())
    content["data"] *= 2
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the id 'q' is there twice"):
        read_squad1(path)


RACE = {"article": "a", "questions": ["q"], "options": [["1", "2", "3", "4"]], "answers": ["C"]}


def test_the_files_of_race_are_read_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 2):
        path = tmp_path / "middle" / f"middle{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**RACE, "article": str(number)}))
    assert [choice.article for choice in read_race(tmp_path).examples] == ["2", "9", "10"]
    assert read_race(tmp_path).examples[0] == MultipleChoice("middle", "2", "q", ("1", "2", "3", "4"), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": ["E"]}, "question 0: the answer must be one of A, B, C, D, got 'E'"),
        ({"answers": [""]}, "question 0: the answer must be one of"),
        ({"answers": []}, "must be lists of one length"),
        ({"options": [["1", "2", "3"]]}, "needs 4 options, which are texts, got ['1', '2', '3']"),
        ({"options": [["1", "2", "3", 4]]}, "needs 4 options, which are texts"),
        ({"questions": [None]}, "must be a text with a list of options"),
        ({"article": 3}, "article must be a text, got 3"),
    ],
)
def test_another_file_in_a_directory_of_race_is_refused(tmp_path, changes, message):
    (tmp_path / "high").mkdir()
    (tmp_path / "high" / "high1.txt").write_text(json.dumps(RACE | changes))
    with pytest.raises(ValueError) as error:
        read_race(tmp_path)
    assert message in str(error.value) and "high1.txt" in str(error.value)


def test_a_split_of_race_has_two_directories(tmp_path):
    with pytest.raises(ValueError, match="has neither a directory middle nor one high"):
        read_race(tmp_path)
    (tmp_path / "high").mkdir()
    with pytest.raises(ValueError, match="has no question that can be used"):
        read_race(tmp_path)
