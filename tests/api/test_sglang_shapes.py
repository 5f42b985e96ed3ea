"""Answers of /generate: a list of prompts is answered by a list, be it of one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quiesce.api.chat import TextModel
from quiesce.api.sglang import GenerateShape, parse_generate
from quiesce.api.shapes import Choice, usage


@pytest.mark.parametrize(
    ("asked", "listed"),
    [
        ({"text": "a"}, False),
        ({"text": ["a"]}, True),
        ({"input_ids": [4, 5]}, False),
        ({"input_ids": [[4, 5]]}, True),
        ({"text": "a", "sampling_params": {"n": 2}}, True),
    ],
)
def test_a_list_of_prompts_is_answered_by_a_list(text: TextModel, asked: dict[str, Any], listed: bool) -> None:
    wanted = parse_generate(json.dumps(asked).encode())
    shape = GenerateShape("rid", "tiny", text.vocabulary, wanted)
    choices = [Choice("x", [], "stop", token_ids=[4])] * (len(wanted.prompts) * wanted.n)
    answer = json.loads(shape.whole(choices, usage(1, 1, 0)))
    assert isinstance(answer, list) == listed
    assert [one["text"] for one in (answer if listed else [answer])] == ["x"] * len(choices)
