from __future__ import annotations

import asyncio
import json

import pytest

from quiesce.ops import probe
from quiesce.ops.probe import Health, http_probe


def ask(answer: bytes | None) -> Health:
    """One probe of a server that sends `answer`; of no server at all for None."""

    async def story() -> Health:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer or b"")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if answer is None:
            server.close()
            await server.wait_closed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe, "PATIENCE", 60.0)  # it asks again where it counts, and here it is asked once
            health = await http_probe("0.0.0.0", port)()
        server.close()
        return health

    return asyncio.run(story())


def http(status: int, detail: object) -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n\r\n{json.dumps(detail)}".encode()


def test_a_ready_cluster_names_the_epochs_in_good_standing() -> None:
    workers = [{"epoch": "00ff", "trouble": None}, {"epoch": "0a", "trouble": "silent for 3 s"}]
    health = ask(http(200, {"workers": workers, "missing": []}))
    assert health == Health(True, True, frozenset({255}), "")


def test_a_cluster_that_cannot_serve_says_why() -> None:
    detail = {"workers": [], "missing": ["no decode worker is usable"], "mismatches": ["a and b: dtype"]}
    health = ask(http(503, detail))
    assert (health.answers, health.ready) == (True, False)
    assert health.missing == "no decode worker is usable; a and b: dtype"


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 200 OK\r\n\r\nnot json", b"\xff" * 100, http(200, [1])])
def test_anything_else_is_a_router_that_does_not_answer_yet(answer: bytes | None) -> None:
    assert ask(answer) == Health(answers=False)
