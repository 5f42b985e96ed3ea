"""Clients that are rude in an exact way: raw sockets that stream, wait, and leave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

from e2e.product import Product


class Stream:
    """One streamed completion over its own connection. `events` are the JSON objects that have arrived."""

    def __init__(self, product: Product, prompt: Sequence[int], tokens: int, timeout: float = 120.0) -> None:
        self.began = time.monotonic()
        self.socket = socket.create_connection(("127.0.0.1", product.port), timeout)
        asked = {"model": product.name, "prompt": list(prompt), "max_tokens": tokens, "stream": True}
        body = json.dumps(asked | {"temperature": 0, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: q\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)
        self._raw = b""

    def read_some(self) -> bool:
        """Waits for bytes. False: the server has closed the connection."""
        chunk = self.socket.recv(65536)
        self._raw += chunk
        return bool(chunk)

    def until_event(self) -> None:
        while b"data: " not in self._raw:
            if not self.read_some():
                raise AssertionError(f"closed before the first event: {self._raw!r}")

    def to_end(self) -> None:
        while self.read_some():
            pass

    @property
    def status(self) -> int:
        return int(self._raw.split(b" ", 2)[1]) if self._raw else 0

    @property
    def body(self) -> bytes:
        """What the chunks of the transfer encoding hold, as far as they have arrived."""
        head, _, rest = self._raw.partition(b"\r\n\r\n")
        if b"chunked" not in head.lower():
            return rest
        found = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size or b"0", 16)
            found, rest = found + rest[:length], rest[length + 2 :]
        return found

    @property
    def whole(self) -> bool:
        return b"data: [DONE]" in self.body

    @property
    def error(self) -> str | None:
        """The message of an error answer or of an error event."""
        text = self.body
        if self.status >= 400:
            return str(json.loads(text)["error"]["message"])
        events = [json.loads(line[6:]) for line in text.split(b"\n\n") if line.startswith(b"data: {")]
        return next((event["error"]["message"] for event in events if "error" in event), None)

    @property
    def text(self) -> str:
        events = [json.loads(line[6:]) for line in self.body.split(b"\n\n") if line.startswith(b"data: {")]
        return "".join(choice["text"] for event in events for choice in event.get("choices", ()))

    def close(self) -> None:
        self.socket.close()
