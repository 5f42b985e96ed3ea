"""TLS 1.3 from PEM files: both sides show a certificate of one authority, or the server alone shows one."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path

from quiesce.channel.private import check_private

HOST, HOST_KEY, AUTHORITY = "host.pem", "host.key", "ca.pem"  # in the folder `tls` of a host's keys

Files = tuple[Path | None, Path | None, Path | None]  # certificate, key, authority


@dataclass(frozen=True)
class Certificates:
    """`ca`: who must have signed the other side's certificate; None: a server that asks for none."""

    cert: Path
    key: Path
    ca: Path | None

    @classmethod
    def named(cls, cert: Path | None, key: Path | None, ca: Path | None) -> Certificates | None:
        """None: no certificate was named."""
        return None if cert is None or key is None else cls(cert, key, ca)

    @classmethod
    def of(cls, keys: Path) -> Certificates | None:
        """Those that `quiesce keys` put into a host's folder of keys, where it did."""
        folder = keys / "tls"
        if not folder.is_dir():
            return None
        return cls(folder / HOST, folder / HOST_KEY, folder / AUTHORITY)

    @classmethod
    def files(cls, named: Files, keys: Path) -> Files:
        """The files that were named or, where none was, those in a host's folder of keys."""
        found = None if any(named) else cls.of(keys)
        return named if found is None else (found.cert, found.key, found.ca)

    def server(self) -> ssl.SSLContext:
        """Raises ValueError naming the file that does not do."""
        context = self._context(ssl.Purpose.CLIENT_AUTH)
        context.verify_mode = ssl.CERT_NONE if self.ca is None else ssl.CERT_REQUIRED
        return context

    def client(self, check_name: bool = True) -> ssl.SSLContext:
        """For a client that shows the same certificate. `check_name`: the server's must name the address it is at.
        Raises ValueError."""
        context = self._context(ssl.Purpose.SERVER_AUTH)
        context.check_hostname = check_name
        context.verify_mode = ssl.CERT_REQUIRED if self.ca is not None or check_name else ssl.CERT_NONE
        return context

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        try:
            check_private(self.key)
            context = ssl.create_default_context(purpose, cafile=None if self.ca is None else str(self.ca))
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = ", ".join(str(path) for path in (self.cert, self.key, self.ca) if path is not None)
            raise ValueError(f"TLS with {files}: {error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    def try_out(self) -> None:
        """A handshake with itself, in memory: what will not do is heard of at start-up. Raises ValueError."""
        server, client = self.server(), self.client(check_name=False)
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            server.wrap_bio(theirs, ours, server_side=True),
            client.wrap_bio(ours, theirs, server_side=False),
        ]
        try:
            for end in [*reversed(ends)] * 3:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            raise ValueError(
                f"the certificate {self.cert} does not pass its own check against {self.ca}: {why}. It must be in "
                "force, for servers and clients, and of that authority; `quiesce keys` makes such ones"
            ) from error
