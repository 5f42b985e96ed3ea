"""Log lines of a process, on stderr: one line each, as text for people or as JSON for machines.

A line is about something: `log.info("...", extra={"rid": ..., "transfer": ...})`. Text shows the ids behind the
message, JSON every field. Bytes are never shown: keys, digests and descriptors are bytes.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from typing import Any

import msgspec

from quiesce.options import SUPERVISED
from quiesce.roles.settings import LogFormat

IDS = ("rid", "client_id", "room", "transfer", "peer_epoch")  # what a text line shows
LONGEST = 4000  # characters of a message or of a traceback
LONGEST_LINE = 15 << 10  # bytes; the supervisor breaks longer ones
CUT = 400  # characters of each field of a line that would be longer
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure_logging(level: str, form: LogFormat = "text", process: str = "") -> None:
    """level: debug, info, warning or error. Text names the process only where no supervisor puts it in front."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines(process) if form == "json" else TextLines("" if os.environ.get(SUPERVISED) else process)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextLines(logging.Formatter):
    def __init__(self, process: str = "") -> None:
        name = f"{process} " if process else ""  # it holds no %
        super().__init__(f"%(asctime)s {name}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = [f"{name}={value}" for name in IDS if (value := getattr(record, name, None)) is not None]
        return " ".join([super().formatMessage(record), *ids])


class JsonLines(logging.Formatter):
    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)[-LONGEST:]
        level, logger = record.levelname.lower(), record.name
        return json_line(self._process, record.getMessage(), record.created, level=level, logger=logger, **fields)


def json_line(process: str, message: str, at: float, **fields: Any) -> str:
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    shown = {name: value for name, value in fields.items() if value is not None}
    said = {"time": when, "process": process, "message": message[:LONGEST], **shown}
    line = msgspec.json.encode(_plain(said))
    if len(line) > LONGEST_LINE:
        names = ("time", "process", "message", *IDS)
        kept = {name: str(value)[:CUT] for name, value in said.items() if name in names}
        line = msgspec.json.encode(kept | {"cut": len(line)})
    return line.decode()


def _plain(value: Any) -> Any:
    match value:
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case str() | int() | float() | bool() | None:
            return value
    return str(value)
