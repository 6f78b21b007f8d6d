"""Answers to wrong commands and wrong calls are those of tests/golden/mistakes.txt, which people review.

After a change: python tests/support/mistakes.py > tests/golden/mistakes.txt
"""

from __future__ import annotations

import pytest
from mistakes import COMMANDS, HEAVY, answers_to_calls, answers_to_commands, golden


def check(answers, sign):
    expected = {answer.partition("\n")[0]: answer for answer in golden() if answer.startswith(sign)}
    for answer in answers:
        assert answer.rstrip("\n") == expected[answer.partition("\n")[0]].rstrip("\n")


def test_wrong_commands():
    check(answers_to_commands(COMMANDS), "$ ")


@pytest.mark.full
def test_wrong_commands_that_import_torch():
    check(answers_to_commands(HEAVY), "$ ")


def test_wrong_calls():
    check(answers_to_calls(), ">>> ")


def test_no_answer_is_a_traceback_or_missing():
    answers = golden()
    assert len(answers) > 120
    for answer in answers:
        assert "Traceback" not in answer and "no error" not in answer
        assert answer.startswith(">>> ") or answer.rstrip().endswith("(status 2)")
