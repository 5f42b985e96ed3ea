"""The floods of `make soak-router`, small: nothing grows, streams go on, every bad thing is counted."""

from __future__ import annotations

import pytest

from e2e.floods import EVICTED, HEADLESS, INVALID, control_sockets, flood, many_clients
from e2e.product import Product

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOMS, CONNECTIONS, REQUESTS = 1500, 300, 900


def test_k20_d7_fake_rooms_half_handshakes_garbage_and_half_requests_change_nothing(serve: Product) -> None:
    sockets = len(control_sockets(serve))
    assert sockets == 3, "the registry, prefill and decode"
    found = flood(serve, ROOMS, CONNECTIONS, REQUESTS)
    rooms, counted = found["fake rooms"], found["counted"]
    assert sum(rooms.values()) == ROOMS and not set(rooms) - {"refused 400", "refused 503", "failed 504"}
    came = sum(value for name, value in counted.items() if "connections_total" in name)
    failed = dict.fromkeys(("key", "half", "protocol", "foreign"), 0.0)
    for name, value in counted.items():
        if "handshakes_failed" in name:
            failed[name.partition('kind="')[2].partition('"')[0]] += value
    assert came >= 2 * CONNECTIONS * sockets
    assert failed["half"] >= CONNECTIONS * sockets and failed["foreign"] > 0.9 * CONNECTIONS * sockets, failed
    assert sum(failed.values()) == 2 * CONNECTIONS * sockets, "garbage may begin as a handshake does"
    assert counted[INVALID] == CONNECTIONS
    assert sum(value for name, value in counted.items() if "attach_refused" in name) == CONNECTIONS
    assert counted[EVICTED] >= REQUESTS - HEADLESS
    assert found["longest pause of a stream, s"] < 10, "on any machine; make soak-router tells the figure"


def test_many_streams_and_short_requests_beside_them_and_all_leave_at_once(serve: Product) -> None:
    found = many_clients(serve, streams=150, short=40)
    assert found["idle again after, s"] < 30, found
