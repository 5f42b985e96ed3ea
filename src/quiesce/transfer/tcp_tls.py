"""TLS for the tcp transport: both sides show a certificate of one authority."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec


class Tls(msgspec.Struct, frozen=True):
    """PEM files. Both sides show a certificate, and take one that `ca` has signed."""

    cert: Path
    key: Path
    ca: Path

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """(for the lender, for the poster). Raises ValueError naming the file that does not do."""
        made = []
        for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
            try:
                context = ssl.create_default_context(purpose, cafile=str(self.ca))
                context.load_cert_chain(self.cert, self.key)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"TLS for tcp: {self.cert}, {self.key} or {self.ca}: {error}") from error
            context.check_hostname = False  # peers are known by the authority and the descriptor's secret
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            made.append(context)
        return made[0], made[1]
