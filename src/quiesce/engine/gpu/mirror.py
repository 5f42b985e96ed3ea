"""A device pool's pages once more in host memory, under the same numbers: what transports move.

Page i of the mirror is lent whenever page i of the pool is, so one lease and one proof stand for both. What lands
late lands in the mirror alone, which the engine reads only once, after the transfer was committed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from quiesce.transfer.interface import Arena

log = logging.getLogger("quiesce.engine")


class Mirror:
    def __init__(self, memory: torch.Tensor, arena: Arena) -> None:
        """`memory` uint8 [pages or more, page_bytes] on the device."""
        self._memory, self._host = memory, torch.from_numpy(arena.pages)
        self.pinned = memory.device.type == "cuda" and _pinned(self._host)
        self.published = self.fetched = 0  # pages

    def publish(self, pages: Sequence[int]) -> None:
        """Device to host. Over once the device was waited for."""
        for page in pages:
            self._host[page].copy_(self._memory[page], non_blocking=True)
        self.published += len(pages)

    def fetch(self, pages: Sequence[int]) -> None:
        """Host to device, in the order of the stream. The host pages stay as they are until it was waited for."""
        for page in pages:
            self._memory[page].copy_(self._host[page], non_blocking=True)
        self.fetched += len(pages)


def _pinned(host: torch.Tensor) -> bool:
    """Copies to and from memory that the driver has pinned need no buffer in between."""
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))  # type: ignore[no-untyped-call]
    if code:
        log.warning("the mirror of the KV pool cannot be pinned (CUDA error %d): its copies are slower", code)
    return not code
