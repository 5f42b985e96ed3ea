"""Stands before every route: the key is checked before a byte of the body is read, and new routes are closed."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from quiesce.api.access import Access
from quiesce.api.errors import ApiError

OPEN = ("/health", "/ready", "/metrics", "/openapi.json", "/health_generate")  # for probes and scrapers
ADMIN = ("/debug/", "/admin/")
KEY = "quiesce.key"  # of the scope: the Key that asks


class Guard:
    def __init__(self, app: ASGIApp, access: Access, refused: Callable[[int], None]) -> None:
        """refused: told the status of each request that was not let in."""
        self._app = app
        self._access = access
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                key = self._access.who(dict(scope["headers"]))
                if scope["path"].startswith(ADMIN) and not key.admin:
                    raise ApiError(403, "this page is for keys with admin = true", code="not_admin")
            except ApiError as error:
                self._refused(error.status)
                await _refuse(error, send)
                return
            scope[KEY] = key
        await self._app(scope, receive, send)


async def _refuse(error: ApiError, send: Send) -> None:
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
