"""Messages to bytes and back, within a size: what does not fit or is no message is counted, never fatal."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from quiesce.core.messages import Wire


class Codec:
    """Encodes and decodes with a size limit. Malformed input is counted, never fatal."""

    MAX_BYTES: ClassVar[int] = 16 << 20

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Wire] = msgspec.msgpack.Decoder(Wire)
        self.malformed = 0

    def encode(self, message: Wire) -> bytes:
        frame = self._encoder.encode(message)
        if len(frame) > self.MAX_BYTES:
            raise ValueError(f"{type(message).__name__} of {len(frame)} bytes exceeds {self.MAX_BYTES}")
        return frame

    def decode(self, frame: bytes | memoryview) -> Wire | None:
        """The message, or None (counted in `malformed`) for anything that is not one."""
        if len(frame) > self.MAX_BYTES:
            self.malformed += 1
            return None
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.malformed += 1
            return None
