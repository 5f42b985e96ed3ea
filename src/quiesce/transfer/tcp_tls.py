"""TLS for the tcp transport: both sides show a certificate of one authority."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from quiesce.channel.tls import Certificates


class Tls(msgspec.Struct, frozen=True):
    """PEM files. Both sides show a certificate, and take one that `ca` has signed."""

    cert: Path
    key: Path
    ca: Path

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """(for the lender, for the poster). Raises ValueError naming the file that does not do. Peers are known by
        the authority and the descriptor's secret, not by an address."""
        files = Certificates(self.cert, self.key, self.ca)
        return files.server(), files.client(check_name=False)
