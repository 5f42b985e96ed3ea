"""An answer that breaks never looks whole: 5xx before the first byte, an error event and no terminator after it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from e2e.product import Product, until
from scenarios.asking import COMPLETIONS, ask, events, opened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = [30, 31, 32, 33, 34]
LONG = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
FINISH_REASONS = {None, "stop", "length"}


def usable(pd: Product) -> bool:
    return pd.healthy() and ask(pd, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})["status"] == 200


@pytest.mark.parametrize("victim", ["transfer", "prefill"])
def test_scenario_f31_broken_before_the_first_byte(pd: Product, victim: str) -> None:
    """The mover stands still, so that both requests are in the middle of their transfer when it happens."""
    until(lambda: usable(pd), 150, "the server to be usable")
    mover = pd.mover()
    os.kill(mover, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, pd, COMPLETIONS, LONG, stream) for stream in (False, True)]
        until(lambda: pd.ledger()["prefill-0"]["posts"] == 2, 30, "both transfers")
        os.kill(mover if victim == "transfer" else pd.pid("prefill-0"), signal.SIGKILL)
        for answer in answers:
            said = answer.result(timeout=60)
            assert 500 <= said["status"] <= 599, said
            assert said["error"]["message"] and said["error"]["type"], said
    until(lambda: usable(pd), 150, "the server to be usable again")
    pd.check_idle()


def test_scenario_f31_broken_after_five_tokens(pd: Product) -> None:
    until(lambda: usable(pd), 150, "the server to be usable")
    whole = ask(pd, COMPLETIONS, LONG)["choices"][0]["text"]
    mover, decode = pd.mover(), pd.pid("decode-0")
    with ThreadPoolExecutor(3) as pool:
        os.kill(mover, signal.SIGSTOP)  # until all three are there, so that none is over before the last one begins
        try:
            waiting = pool.submit(ask, pd, COMPLETIONS, LONG)
            reading = pool.submit(read_by_client, pd)
            streaming = pool.submit(read_until_broken, pd, lambda: os.kill(decode, signal.SIGKILL))
            until(lambda: pd.ledger()["prefill-0"]["posts"] == 3, 60, "three transfers")
        finally:
            os.kill(mover, signal.SIGCONT)
        said, reason, text = streaming.result(timeout=60)
        assert "[DONE]" not in said
        error = json.loads(said[-1])["error"]
        assert error["message"] and set(error) <= {"message", "type", "param", "code"}
        assert reason == {None}, "no finish reason: it was not finished"
        assert text and whole.startswith(text)
        answer = waiting.result(timeout=60)
        assert 500 <= answer["status"] <= 599 and answer["error"]["message"]
        assert isinstance(reading.result(timeout=60), openai.APIError), "a standard client raises"
    until(lambda: usable(pd), 150, "the server to be usable again")
    pd.check_idle()


def read_until_broken(pd: Product, breaks: Callable[[], object]) -> tuple[list[str], set[Any], str]:
    """All events of a stream that is broken after five of its tokens, its finish reasons, its text."""
    said: list[str] = []
    with opened(pd, LONG) as answer:
        assert answer.status_code == 200
        for event in events(answer):
            said.append(event)
            if len(said) == 5:
                until(lambda: pd.ledger()["decode-0"]["running"] == 3, 30, "all three to be decoding")
                breaks()
    choices = [choice for event in said for choice in json.loads(event).get("choices", [])]
    reasons = {choice["finish_reason"] for choice in choices}
    assert reasons <= FINISH_REASONS
    return said, reasons, "".join(choice["text"] for choice in choices)


def read_by_client(pd: Product) -> Exception | None:
    """What the official client makes of the same break."""
    try:
        with pd.client() as client:
            stream = client.completions.create(
                model=pd.name,
                prompt=PROMPT,
                max_tokens=480,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _chunk in stream:
                pass
    except openai.OpenAIError as error:
        return error
    return None
