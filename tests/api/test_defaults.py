"""Sampling values that come from the model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quiesce.api.chat import TextModel
from quiesce.api.defaults import OPENAI, sampling_defaults
from router.cluster import cluster
from tiny_model import make_tiny_llama


def test_a_file_without_them_gives_openais() -> None:
    assert sampling_defaults({"eos_token_id": 1}) == OPENAI


def test_a_file_with_some_gives_those() -> None:
    file = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults(file) == OPENAI | {"temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults({"temperature": 1, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    assert sampling_defaults({"top_k": -1})["top_k"] == 0


def test_a_file_that_does_not_sample_means_no_temperature_but_its_penalty() -> None:
    file = {"do_sample": False, "temperature": 0.2, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}
    assert sampling_defaults(file) == OPENAI | {"repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 3), ("temperature", "hot"), ("top_p", 0), ("top_k", 2.5), ("min_p", True)]
)
def test_a_value_that_no_request_may_have_is_refused_with_the_folder_named(
    tmp_path: Path, name: str, value: Any
) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{tmp_path}.*generation_config.json: {name} must be"):
        TextModel(tmp_path)


@pytest.mark.anyio
async def test_a_requests_own_values_win_field_by_field(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    given = {"do_sample": True, "temperature": 0.25, "top_p": 0.5, "repetition_penalty": 1.5}
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1} | given))
    text = TextModel(model)
    async with cluster(tmp_path / "keys", text) as c:
        for fields in ({}, {"temperature": 0}, {"top_p": 0.75, "repetition_penalty": 1}):
            answer = await c.chat(**fields)
            assert answer.status_code == 200, answer.text
            found = c.decode.starts[answer.headers["x-quiesce-request-id"]].sampling
            expected = given | fields
            assert {name: getattr(found, name) for name in given if name != "do_sample"} == {
                name: value for name, value in expected.items() if name != "do_sample"
            }
    text.close()
