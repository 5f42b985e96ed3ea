"""Errors as a client sees them: OpenAI's shape, naming the field and the limit."""

from __future__ import annotations

import msgspec

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    408: "timeout_error",
    409: "conflict_error",
    502: "worker_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """One refusal or failure. `retry_after` (seconds) becomes a Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}` as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(503, message, code=code, retry_after=retry_after)
