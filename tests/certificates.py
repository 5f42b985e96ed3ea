"""Certificates to test with, made by what `quiesce keys` is: good ones, one that has ended, one of a stranger."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest

from quiesce.channel.tls import Certificates
from quiesce.ops import authority

HOSTS = {"alpha": ("127.0.0.1", ("router", "prefill-0")), "beta": ("127.0.0.2", ("decode-0",))}


@dataclass(frozen=True)
class Hosts:
    """Folders of keys. `ended`: of a host whose certificate was in force last month; `stranger`: of another
    authority."""

    folder: Path
    alpha: Path
    beta: Path
    ended: Path
    stranger: Path

    def client(self, host: Path | None) -> ssl.SSLContext:
        """For a client with that host's certificate, or with none, that trusts alpha's and beta's authority."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        if host is not None:
            context.load_cert_chain(host / "tls" / "host.pem", host / "tls" / "host.key")
        return context

    @property
    def tls(self) -> Certificates:
        """alpha's."""
        found = Certificates.of(self.alpha)
        assert found is not None
        return found


def make_hosts(folder: Path) -> Hosts:
    day = datetime.timedelta(days=1)
    now = authority._now()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authority, "_now", lambda: now - 60 * day)
        authority.init(folder / "ca", 365)
        ended = authority.add_host(folder / "ca", "old", ("127.0.0.1",), (), days=30)
    made = {
        name: authority.add_host(folder / "ca", name, (address,), processes)
        for name, (address, processes) in HOSTS.items()
    }
    authority.init(folder / "other")
    stranger = authority.add_host(folder / "other", "alpha", ("127.0.0.1",), ("router",))
    return Hosts(folder / "ca", made["alpha"], made["beta"], ended, stranger)
