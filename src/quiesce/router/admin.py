"""The operator's side door: which workers there are, let one have no new work, take one out, let a new one in.

It listens on an address of its own. A Unix socket is guarded by its file mode; a TCP port asks for a key with every
request; one that other machines reach is behind TLS, and asks for a client's certificate too. Workers register by
themselves over CURVE, so to let one in is to put its public key on the ring, and to take one out is to take the key
off and end what it has; its requests are tried again or go on elsewhere, as the rules say.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quiesce.channel import KeyRing
from quiesce.channel.private import is_loopback
from quiesce.router.dispatch import Dispatcher
from quiesce.router.registry import Worker

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
PUBLIC_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # z85
RESERVED = ("router", "supervisor")
LONGEST_BODY = 4096
SHORTEST_KEY = 16  # characters
UNIX = "unix://"


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    public_key: str  # z85


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def bind(address: str, key: str, *, beyond: bool = False) -> socket.socket:
    """A listening socket at `unix:///path` or `host:port`. `beyond`: clients show a certificate, so other machines
    may reach it. Raises ValueError for an address without protection."""
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen()
        return listening
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not beyond and not is_loopback(host):
        raise ValueError(
            f"--admin must be unix:///path or a port of this machine (127.0.0.1:port), not {address!r}: other "
            "machines reach that, which takes certificates on both sides (--keys, or --tls-client-ca)"
        )
    if len(key) < SHORTEST_KEY:
        raise ValueError(f"--admin on a TCP port needs --admin-key, a file with {SHORTEST_KEY} characters or more")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family)


class Admin:
    """`key`: empty where the socket's file mode is the protection."""

    def __init__(self, dispatcher: Dispatcher, ring: KeyRing, key: str = "") -> None:
        self._dispatcher, self._ring, self._key = dispatcher, ring, key

    def app(self) -> Starlette:
        def route(path: str, call: Any, method: str) -> Route:
            async def guarded(request: Request) -> Response:
                try:
                    self._check(request)
                    return _json(await call(request))
                except Refused as refused:
                    return _json({"error": str(refused)}, refused.status)

            return Route(path, guarded, methods=[method])

        return Starlette(
            routes=[
                route("/workers", self.workers, "GET"),
                route("/workers", self.add, "POST"),
                route("/workers/{name}", self.remove, "DELETE"),
                route("/workers/{name}/drain", self.drain, "POST"),
                route("/workers/{name}/resume", self.resume, "POST"),
            ]
        )

    def _check(self, request: Request) -> None:
        if not self._key:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            log.warning("admin: %s %s without the right key", request.method, request.url.path)
            raise Refused(401, "this needs the header Authorization: Bearer KEY")

    def _worker(self, request: Request) -> Worker:
        name = request.path_params["name"]
        worker = self._dispatcher.registry.workers.get(name)
        if worker is None:
            raise Refused(404, f"no worker {name[:100]!r} is registered")
        return worker

    async def workers(self, request: Request) -> Any:
        """Those that are registered, as /health shows them, and the names on the ring that may register."""
        registered = self._dispatcher.health()[1]["workers"]
        return {"workers": registered, "may_register": sorted(self._names())}

    def _names(self) -> list[str]:
        return [name for name in self._ring.names().values() if name not in RESERVED]

    async def add(self, request: Request) -> Any:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_BODY:
                raise Refused(413, f"more than {LONGEST_BODY} bytes")
        try:
            new = msgspec.json.decode(body, type=NewWorker)
        except msgspec.MsgspecError as error:
            raise Refused(400, f'expected {{"name": "...", "public_key": "..."}}: {error}') from error
        if not NAME.fullmatch(new.name) or new.name in RESERVED:
            raise Refused(400, "name: 1 to 40 letters, digits, - or _, and not router or supervisor")
        if not PUBLIC_KEY.fullmatch(new.public_key):
            raise Refused(400, "public_key: 40 characters of z85, as in NAME.pub")
        if self._ring.names().get(new.public_key, new.name) != new.name:
            raise Refused(409, "this key is on the ring under another name")
        if new.name in self._names() and new.public_key not in self._ring.names():
            raise Refused(409, f"{new.name} is on the ring with another key; take it out first")
        self._ring.add(new.name, new.public_key)
        log.info("admin: %s may register", new.name)
        return {"name": new.name, "may_register": True}

    async def drain(self, request: Request) -> Any:
        """No new work from now on; what it has goes on. It stays registered."""
        worker = self._worker(request)
        worker.drained = "an operator lets it have no new work"
        log.info("admin: %s gets no new work", worker.name)
        return {"name": worker.name, "legs": len(worker.legs)}

    async def resume(self, request: Request) -> Any:
        worker = self._worker(request)
        worker.drained = ""
        log.info("admin: %s gets work again", worker.name)
        return {"name": worker.name, "legs": len(worker.legs)}

    async def remove(self, request: Request) -> Any:
        """Now: its key opens no session any more, and its requests end here."""
        worker = self._worker(request)
        self._ring.remove(worker.name)
        legs = len(worker.legs)
        self._dispatcher.remove(worker, "an operator took it out")
        log.info("admin: %s is taken out, with %d legs", worker.name, legs)
        return {"name": worker.name, "legs_ended": legs}


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
