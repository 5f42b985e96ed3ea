"""Who may ask, and how much: API keys from a file, each with the tenant it speaks for and its quotas.

Keys are kept as SHA-256 alone, compared in constant time, and never logged. The file is read again when it changes,
so a key is added or taken back without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from quiesce.api.errors import ApiError

log = logging.getLogger(__name__)

MAX_KEYS = 1024
MAX_KEY = 512  # bytes of one key
LOOK_SECONDS = 1.0  # between looks at the file
MINUTE = 60.0
MOST = 2**53  # of any quota


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[key]]` of the file: the key itself or the hex SHA-256 of it; a quota of 0 is none."""

    tenant: str
    key: str = ""
    sha256: str = ""
    max_concurrent: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    admin: bool = False  # may see the operator's pages

    def __repr__(self) -> str:
        return f"Entry(tenant={self.tenant!r})"

    def __post_init__(self) -> None:
        if not 1 <= len(self.tenant) <= 64 or not self.tenant.isprintable():
            raise ValueError("a tenant's name has 1 to 64 printable characters")
        if bool(self.key) == bool(self.sha256):
            raise ValueError(f"a key of tenant {self.tenant!r} needs either key or sha256")
        if self.key and not 16 <= len(self.key.encode()) <= MAX_KEY:
            raise ValueError(f"a key of tenant {self.tenant!r} must have 16 to {MAX_KEY} bytes")
        if self.sha256 and not (len(self.sha256) == 64 and set(self.sha256.lower()) <= set("0123456789abcdef")):
            raise ValueError(f"sha256 of tenant {self.tenant!r} must be 64 hex digits")
        quotas = (self.max_concurrent, self.requests_per_minute, self.tokens_per_minute)
        if min(quotas) < 0 or max(quotas) > MOST:
            raise ValueError(f"the quotas of tenant {self.tenant!r} must be 0 to {MOST}")

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256(self.key.encode()).digest()


class File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[Entry]


class Bucket:
    """So many a minute, a minute's worth at once. It may go below 0: what was not known before is paid afterwards."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._rate = per_minute / MINUTE
        self._most = float(per_minute)
        self._level = self._most
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until one is left; 0: there is."""
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._level > 1 - 1e-6 else (1 - self._level) / self._rate

    def take(self, amount: float) -> None:
        self._level -= amount


class Key:
    """What is known of one key while the server runs."""

    def __init__(self, entry: Entry, now: float) -> None:
        self.tenant = entry.tenant
        self.admin = entry.admin
        self.entry = entry
        self.running = 0
        self._requests = Bucket(entry.requests_per_minute, now) if entry.requests_per_minute else None
        self._tokens = Bucket(entry.tokens_per_minute, now) if entry.tokens_per_minute else None

    def enter(self, now: float) -> None:
        """A request begins; `leave` ends it. Raises ApiError 429."""
        most = self.entry.max_concurrent
        if most and self.running >= most:
            raise _too_many(f"{most} requests of this key run already", 1.0, "concurrent_requests")
        if self._requests is not None:
            if wait := self._requests.wait(now):
                text = f"this key may make {self.entry.requests_per_minute} requests a minute"
                raise _too_many(text, wait, "requests")
            self._requests.take(1)
        self.running += 1

    def leave(self) -> None:
        self.running -= 1

    def afford(self, now: float) -> None:
        """Before any work. Raises ApiError 429 while earlier tokens are not paid off."""
        if self._tokens is not None and (wait := self._tokens.wait(now)):
            raise _too_many(f"this key may use {self.entry.tokens_per_minute} tokens a minute", wait, "tokens")

    def used(self, count: int) -> None:
        """Tokens of a prompt that workers were given, and those of its answer."""
        if self._tokens is not None:
            self._tokens.take(count)


def _too_many(text: str, wait: float, code: str) -> ApiError:
    return ApiError(429, text, code=f"rate_limit_exceeded_{code}", retry_after=max(1, math.ceil(wait)))


class Access:
    """Without a file everybody may ask, as the nameless tenant."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError or OSError when the file cannot be used."""
        self._file = file
        self._clock = clock
        self._keys: dict[bytes, Key] = {}
        self._seen: tuple[int, int] | None = None
        self._looked = clock()
        self._anyone = Key(Entry("anyone", sha256="0" * 64), clock())
        self._anyone.tenant, self._anyone.admin = "", True
        if file is not None:
            self._seen = _stamp(file)
            self._take(read_keys(file))

    @property
    def closed(self) -> bool:
        """Keys are needed."""
        return self._file is not None

    def who(self, headers: Mapping[bytes, bytes]) -> Key:
        """The key of a request. Raises ApiError 401."""
        if self._file is None:
            return self._anyone
        self._look()
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not given:
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="missing_api_key")
        digest = hashlib.sha256(given.strip()[: MAX_KEY + 1]).digest()
        found = None
        for known, key in self._keys.items():  # all of them, whichever it is
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise ApiError(401, "this API key is not known here", code="invalid_api_key")
        return found

    def _take(self, entries: list[Entry]) -> None:
        """What is known of keys that stay, stays; changed quotas begin anew."""
        kept = {}
        for entry in entries:
            known = self._keys.get(entry.digest)
            same = known is not None and known.entry == entry
            kept[entry.digest] = known if known is not None and same else Key(entry, self._clock())
        self._keys = kept

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            stamp = _stamp(self._file)
            if stamp == self._seen:
                return
            self._seen = stamp
            self._take(read_keys(self._file))
            log.info("API keys were read again: %d", len(self._keys))
        except (OSError, ValueError) as error:  # a half-written file must not shut everybody out
            log.error("the API keys stay as they were: %s", error)


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_ino


def read_keys(file: Path) -> list[Entry]:
    """Raises OSError, or ValueError that says what is wrong and never shows a key."""
    raw = file.read_bytes()
    try:
        entries = msgspec.convert(tomllib.loads(raw.decode()), File).key
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not TOML: {error}") from None
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not 1 <= len(entries) <= MAX_KEYS:
        raise ValueError(f"{file} must hold 1 to {MAX_KEYS} [[key]] entries, has {len(entries)}")
    if len({entry.digest for entry in entries}) < len(entries):
        raise ValueError(f"{file} has the same key twice")
    mode = stat.S_IMODE(os.stat(file).st_mode)
    if mode & 0o077 and any(entry.key for entry in entries):
        raise ValueError(f"{file} holds keys in plain text and others can read it: chmod 600, or use sha256")
    return entries
