"""The pairing digest: what both legs of a request must agree on before the first post (guard L9)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def pairing_digest(token_ids: Sequence[int], model: str, adapter: str, salt: str) -> bytes:
    """16 bytes over (tokens, model, adapter, tenant salt). Every field is length-prefixed, so none can run into
    the next. Raises OverflowError for a token id outside 0..2^64-1."""
    digest = hashlib.blake2b(digest_size=16, person=b"quiesce.pairing.")
    for field in (array("Q", token_ids).tobytes(), model.encode(), adapter.encode(), salt.encode()):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()
