"""What a client gets over prefill and decode is what one engine with the same weights gives it, in every form."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from e2e.product import Product, until
from scenarios.asking import CHAT, COMPLETIONS, ask
from scenarios.chain_model import ENDS, TEXT, text_ids
from scenarios.conftest import CONTEXT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = [30, 31, 32, 33, 34]  # no part of the chain
HELLO = [{"role": "user", "content": "hello"}]
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
Asked = tuple[str, dict[str, Any]]


def same(pd: Product, one: Product, path: str, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The answer, after comparing it with the other server's."""
    answer, right = ask(pd, path, body, stream), ask(one, path, body, stream)
    assert answer == right
    return answer


# ------------------------------------------------------------ what the first token can do

FIRST: dict[str, tuple[Asked, str | None, str]] = {  # -> text, finish reason
    "eos": ((COMPLETIONS, {"prompt": f"12{ENDS}", "max_tokens": 9}), "", "stop"),
    "eos ignored": ((COMPLETIONS, {"prompt": f"12{ENDS}", "max_tokens": 9, "ignore_eos": True}), None, "length"),
    "stop token id": ((COMPLETIONS, {"prompt": "12☃", "max_tokens": 9, "stop_token_ids": "first"}), "", "stop"),
    "stop string": ((COMPLETIONS, {"prompt": "12☃", "max_tokens": 9, "stop": "한"}), "", "stop"),
    "stop string across": ((COMPLETIONS, {"prompt": "12☃", "max_tokens": 20, "stop": "한🚀"}), "", "stop"),
    "stop string in chat": ((CHAT, {"messages": HELLO, "max_tokens": 20, "stop": ["🚀", "x"]}), "한", "stop"),
    "max_tokens 1": ((COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1}), None, "length"),
    "max_tokens 1 in chat": ((CHAT, {"messages": HELLO, "max_tokens": 1}), "\ufffd", "length"),
    "log-probs": ((COMPLETIONS, {"prompt": PROMPT, "max_tokens": 6, "logprobs": 3}), None, "length"),
    "log-probs in chat": (
        (CHAT, {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
        "한",
        "length",
    ),
    "half a character": ((COMPLETIONS, {"prompt": "12☃", "max_tokens": 3}), "한", "length"),
    "second half first": ((COMPLETIONS, {"prompt": "half", "max_tokens": 3}), "\ufffd\ufffd\ufffd", "length"),
}


@BOTH
@pytest.mark.parametrize("case", FIRST)
def test_scenario_token_1(pd: Product, one: Product, chain: Path, case: str, stream: bool) -> None:
    (path, body), text, reason = FIRST[case]
    body = dict(body)
    ids = text_ids(chain)
    if body.get("prompt") == "half":
        body["prompt"] = [*PROMPT, ids[0]]  # the lead byte is the prompt's
        text = _decoded(chain, ids[1:4])
    if body.get("stop_token_ids"):
        body["stop_token_ids"] = [ids[0]]
    answer = same(pd, one, path, body, stream)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == reason
    if text is not None:
        assert choice["text"] == text
    if "log-probs" in case:
        assert _entries(choice["logprobs"]) == body["max_tokens"]
    assert answer["usage"]["completion_tokens"] <= body["max_tokens"]
    if reason == "length":
        assert answer["usage"]["completion_tokens"] == body["max_tokens"]


@BOTH
def test_scenario_token_1_of_three_samples(pd: Product, one: Product, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 3, "temperature": 2, "seed": 5, "logprobs": 1}
    answer = same(pd, one, COMPLETIONS, body | {"ignore_eos": True}, stream)
    assert len({choice["text"] for choice in answer["choices"]}) == 3, "three different ones"
    assert len({choice["logprobs"]["tokens"][0] for choice in answer["choices"]}) > 1, "from the first token on"
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == len(PROMPT), "one prompt, counted once"


# ------------------------------------------------------------ lengths


@BOTH
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_scenario_f83_exactly_max_tokens(pd: Product, one: Product, tokens: int, stream: bool) -> None:
    answer = same(pd, one, COMPLETIONS, {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}, stream)
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] == "length"


@BOTH
@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_scenario_f83_prompts_that_just_fit_the_context(pd: Product, one: Product, room: int, stream: bool) -> None:
    prompt = [30 + i % 100 for i in range(CONTEXT - room)]
    open_end = same(pd, one, COMPLETIONS, {"prompt": prompt, "ignore_eos": True}, stream)
    if room == 0:
        assert open_end["status"] == 400
        return
    assert open_end["usage"]["completion_tokens"] <= room
    exact = same(pd, one, COMPLETIONS, {"prompt": prompt, "max_tokens": room, "ignore_eos": True}, stream)
    assert exact["usage"]["completion_tokens"] == room
    assert exact["choices"][0]["finish_reason"] == "length"
    same(pd, one, COMPLETIONS, {"prompt": prompt, "max_tokens": room + 1, "ignore_eos": True}, stream)


def test_scenario_f83_one_token_with_decode_stopped_comes_or_fails_within_the_hold_timeout(pd: Product) -> None:
    pid = pd.pid("decode-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        answer = ask(pd, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1})
        assert answer["status"] == 200 or answer["status"] >= 500, answer
        assert time.monotonic() - began < 5 + 40, "a request has ten minutes"
    finally:
        os.kill(pid, signal.SIGCONT)
    pd.check_idle(pd.boot)
    until(lambda: ask(pd, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1})["status"] == 200, 60, "an answer")


# ------------------------------------------------------------ fields that must not be lost between two legs

FIELDS: dict[str, Asked] = {
    "min_tokens": (COMPLETIONS, {"prompt": f"12{ENDS}", "min_tokens": 100, "max_tokens": 120}),
    "min_tokens above max_tokens": (COMPLETIONS, {"prompt": PROMPT, "min_tokens": 5, "max_tokens": 4}),
    "tool_choice required": (CHAT, {"messages": HELLO, "tool_choice": "required", "tools": [{"type": "function"}]}),
    "tool_choice none": (CHAT, {"messages": HELLO, "tool_choice": "none", "max_tokens": 4}),
    "stop": (COMPLETIONS, {"prompt": "12☃", "stop": ["日", "nowhere"], "max_tokens": 40}),
    "n": (COMPLETIONS, {"prompt": PROMPT, "n": 2, "max_tokens": 5, "temperature": 0.8, "seed": 3}),
    "best_of": (COMPLETIONS, {"prompt": PROMPT, "best_of": 3, "n": 1, "max_tokens": 4}),
    "stream_options": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "stream_options": {"include_usage": True}}),
    "json mode": (CHAT, {"messages": HELLO, "max_tokens": 4, "response_format": {"type": "json_object"}}),
    "text mode": (CHAT, {"messages": HELLO, "max_tokens": 4, "response_format": {"type": "text"}}),
    "logprobs": (CHAT, {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 5}),
    "prompt_logprobs": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "prompt_logprobs": 2}),
    "echo": (COMPLETIONS, {"prompt": "12☃", "max_tokens": 4, "echo": True, "logprobs": 2}),
    "echo alone": (COMPLETIONS, {"prompt": "12☃", "max_tokens": 0, "echo": True}),
    "both limits": (CHAT, {"messages": HELLO, "max_tokens": 7, "max_completion_tokens": 4}),
    "penalties": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 9, "repetition_penalty": 2, "presence_penalty": 1}),
    "logit_bias": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "logit_bias": {"40": 100}}),
    "list of prompts": (COMPLETIONS, {"prompt": [PROMPT, [40]], "max_tokens": 4}),
    "unknown": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "no_such_field": 1}),
}


@BOTH
@pytest.mark.parametrize("case", FIELDS)
def test_scenario_f85_each_field_means_the_same(pd: Product, one: Product, case: str, stream: bool) -> None:
    path, body = FIELDS[case]
    answer = same(pd, one, path, body, stream)
    assert answer["status"] in (200, 400)
    if case == "min_tokens":
        assert answer["usage"]["completion_tokens"] >= 100


# ------------------------------------------------------------ characters of several tokens


@BOTH
@pytest.mark.parametrize("tokens", [*range(1, 9), 40])
def test_scenario_f86_characters_survive_every_cut(pd: Product, chain: Path, tokens: int, stream: bool) -> None:
    """Answers that begin and end at every byte of a text in which hardly a character is one byte."""
    ids = text_ids(chain)
    starts = range(len(ids))
    prompts = [[*PROMPT, ids[start - 1]] for start in starts]
    answer = ask(pd, COMPLETIONS, {"prompt": prompts, "max_tokens": tokens}, stream)
    assert answer["status"] == 200, answer
    for start, choice in zip(starts, answer["choices"], strict=True):
        right = [ids[(start + i) % len(ids)] for i in range(tokens)]
        assert choice["text"] == _decoded(chain, right)
        if start == 0 and tokens == 40:
            assert choice["text"].startswith(TEXT * 2)


@BOTH
def test_scenario_f86_echoed_prompts_keep_their_characters(pd: Product, one: Product, stream: bool) -> None:
    for prompt in (
        "한국어",
        "👩\u200d🚀 👨\u200d👩\u200d👧",
        "e\u0301 a\u0308\u0323",
        "日本語のテキスト",
        "\ufffd kept",
    ):
        answer = same(pd, one, COMPLETIONS, {"prompt": prompt, "max_tokens": 5, "echo": True}, stream)
        assert answer["choices"][0]["text"].startswith(prompt)


# ------------------------------------------------------------ log-probabilities


@BOTH
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_scenario_f101_one_entry_a_token_the_first_included(
    pd: Product, one: Product, top: int, n: int, stream: bool
) -> None:
    wanted = {"max_tokens": 20, "n": n, "ignore_eos": True}
    answer = same(pd, one, COMPLETIONS, {"prompt": PROMPT, "logprobs": top, **wanted}, stream)
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 20
        if top:
            for token, value, best in zip(
                found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
            ):
                assert best[token] == pytest.approx(value) == max(best.values()), "greedy takes the best"
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": top, **wanted}
    answer = same(pd, one, CHAT, body, stream)
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        assert len(entries) == 20
        for entry in entries:
            best = entry["top_logprobs"]
            assert len(best) == top
            if top:
                assert (best[0]["token"], best[0]["logprob"]) == (entry["token"], pytest.approx(entry["logprob"]))
        spelt = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert spelt.decode(errors="replace") == choice["text"]


def _entries(logprobs: dict[str, Any]) -> int:
    return len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])


def _decoded(folder: Path, ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids))
