"""Log lines: JSON that names what it is about, text that shows the ids, and nothing that is secret."""

from __future__ import annotations

import io
import json
import logging

import pytest

from quiesce.ops.console import Console
from quiesce.ops.logs import LONGEST, JsonLines, TextLines
from quiesce.ops.process import LONGEST_LINE


def logged(
    formatter: logging.Formatter, text: str, *arguments: object, error: Exception | None = None, **extra: object
) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.Logger("quiesce.decode")
    log.addHandler(handler)
    log.warning(text, *arguments, exc_info=error, extra=extra)
    return stream.getvalue()


def test_json_line_carries_every_field_and_is_one_line() -> None:
    line = logged(
        JsonLines("decode-0"), "the hand-off failed:\n%s", "why", rid="r1", room="9007199254740993", pages=[3]
    )
    assert line.count("\n") == 1
    said = json.loads(line)
    assert said.pop("time").endswith("Z")
    assert said == {
        "process": "decode-0",
        "level": "warning",
        "logger": "quiesce.decode",
        "message": "the hand-off failed:\nwhy",
        "rid": "r1",
        "room": "9007199254740993",
        "pages": [3],
    }


def test_text_line_shows_ids_behind_the_message() -> None:
    line = logged(TextLines(), "ended", rid="r1", transfer="00.7", prompt_tokens=3, peer_epoch=None)
    assert line.rstrip().endswith("WARNING quiesce.decode: ended rid=r1 transfer=00.7")
    assert " decode-0 WARNING " in logged(TextLines("decode-0"), "ended")


def test_bytes_are_never_shown() -> None:
    line = logged(JsonLines(), "hello", descriptor=b"key-material", nested={"secret": [b"key-material"]})
    assert "key-material" not in line
    assert json.loads(line)["descriptor"] == "<12 bytes>"


def test_the_longest_line_is_not_broken_by_the_supervisor() -> None:
    line = logged(JsonLines("prefill-0"), "x" * 100_000, error=ValueError("y" * 100_000))
    assert len(line) < LONGEST_LINE
    said = json.loads(line)
    assert said["message"] == "x" * LONGEST and said["exception"].endswith("yyy")
    wide = logged(JsonLines("prefill-0"), "\x00" * 100_000, rid="r1", reason="z" * 100_000)
    assert len(wide.encode()) < LONGEST_LINE and json.loads(wide)["rid"] == "r1"


@pytest.mark.parametrize("text", ["Traceback (most recent call last):", "{not json", "[1]", '{"a": 1'])
def test_console_wraps_what_is_not_json(text: str) -> None:
    stream = io.StringIO()
    Console(["prefill-0"], stream, "json").line("prefill-0", text)
    said = json.loads(stream.getvalue())
    assert (said["process"], said["message"], said["level"]) == ("prefill-0", text, "info")


def test_console_passes_json_on_and_speaks_it_itself() -> None:
    stream = io.StringIO()
    console = Console(["prefill-0"], stream, "json")
    console.line("prefill-0", '{"process":"prefill-0","message":"hi"}')
    console.quote("prefill-0 ended", ["last words"])
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0] == {"process": "prefill-0", "message": "hi"}
    assert [(line["process"], line["message"].strip()) for line in lines[1:]] == [
        ("serve", "prefill-0 ended"),
        ("serve", "last words"),
    ]
