"""A client that leaves, at every moment: both legs end, prefill stops computing, everything comes back."""

from __future__ import annotations

import time

import pytest

from e2e.conftest import CHUNK
from e2e.product import Product, until
from e2e.streams import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LONG = [20 + i % 200 for i in range(1900)]  # 30 chunks
PROBE = [30, 31, 32, 33]


def ended(product: Product, worker: str, outcome: str) -> float:
    name = f'quiesce:requests_ended_total{{outcome="{outcome}",worker="{worker}"}}'
    return product.metrics().get(name, 0.0)


def aborted(product: Product, worker: str) -> float:
    """Whether the router's word or that of the other leg comes first decides which of the two it is called."""
    return ended(product, worker, "cancelled") + ended(product, worker, "failed")


def computed(product: Product) -> int:
    return int(product.ledger()["prefill-0"]["prompt_tokens_computed"])


def test_abort_in_the_middle_of_the_answer(serve: Product) -> None:
    right = serve.ask(PROBE)
    before = ended(serve, "decode-0", "cancelled")
    with serve.client() as client:
        stream = client.completions.create(
            model=serve.name, prompt=PROBE, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        until(lambda: serve.ledger()["decode-0"]["running"] == 1, 30, "it to be in the batch")
        stream.close()
    until(lambda: serve.ledger()["decode-0"]["running"] == 0, 30, "decode to stop")
    serve.check_idle(serve.boot)
    assert ended(serve, "decode-0", "cancelled") == before + 1
    assert serve.ask(PROBE) == right


def test_d23_abort_before_the_first_token_stops_prefill_within_a_chunk(serve: Product) -> None:
    """Both legs are cancelled; the computed-token counter stops within one chunk of each close."""
    right = serve.ask(PROBE)
    before = {worker: aborted(serve, worker) for worker in ("decode-0", "prefill-0")}
    cut = 0
    for _ in range(8):
        start = computed(serve)
        stream = Stream(serve, LONG, 4)
        until(lambda start=start: computed(serve) > start, 30, "prefill to begin")
        stream.close()
        until(lambda: not serve.ledger()["prefill-0"]["legs"], 30, "the prefill leg to end")
        stopped = computed(serve)
        time.sleep(0.2)  # a window in which nothing may be computed; not an order
        assert computed(serve) <= stopped + CHUNK
        cut += stopped - start < len(LONG)
    assert cut >= 3, "most of them were cut before the prompt was computed"
    before_it = computed(serve)
    assert serve.ask(PROBE) == right
    assert computed(serve) <= before_it + CHUNK + len(PROBE), "nobody waits behind cancelled prompts"
    serve.check_idle(serve.boot)
    for worker, count in before.items():
        assert aborted(serve, worker) >= count + cut, f"{worker}: both legs show an abort"


def test_abort_of_requests_that_wait_for_pages(serve: Product) -> None:
    """Each may need an eighth of the pool; the ones behind are cut while they wait, before any offer."""
    right = serve.ask(PROBE)
    streams = [Stream(serve, [40 + i] * 100, 1900) for i in range(24)]
    until(lambda: serve.ledger()["decode-0"]["waiting"] > 8, 30, "requests to wait")
    for stream in streams[::-1]:
        stream.close()
    serve.check_idle(serve.boot)
    assert serve.ask(PROBE) == right


def test_one_client_leaves_and_the_others_are_not_touched(serve: Product) -> None:
    prompts = [[50 + i, 60 + i, 70 + i] for i in range(8)]
    alone = [serve.ask(prompt, tokens=200) for prompt in prompts]
    streams = [Stream(serve, prompt, 200) for prompt in prompts]
    for stream in streams[1::2]:
        stream.until_event()
        stream.close()
    for stream, text in zip(streams[::2], alone[::2], strict=True):
        stream.to_end()
        assert stream.whole and stream.text == text
    serve.check_idle(serve.boot)
