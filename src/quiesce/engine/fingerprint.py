"""What two engines must share before a page of one means anything to the other."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import xxhash

from quiesce.core.fingerprint import Fingerprint
from quiesce.engine.config import ModelConfig
from quiesce.engine.errors import EngineError
from quiesce.engine.weights import weight_files

LAYOUT = "page-major/row"  # [layers, 2 (k, v), page_size, kv_heads, head_dim] in one contiguous page
MAX_HEADER_BYTES = 64 << 20
EDGE_BYTES = 1 << 20  # of each file, read at its start and at its end
SAMPLES, SAMPLE_BYTES = 64, 64 << 10  # evenly spaced over the rest of it


def fingerprint(config: ModelConfig, dtype: str, page_size: int, quantization: str = "none") -> Fingerprint:
    """`weights` digests config.json and of each safetensors file its name, size, header and samples of its values:
    two fine-tunes of one model differ, and a file of any size takes milliseconds. Quantised weights are others."""
    digest = _weights_digest(config.folder)
    return Fingerprint(
        model=f"{config.model_type}/{config.layers}x{config.hidden_size}/vocab{config.vocab_size}",
        weights=digest if quantization == "none" else f"{digest}/{quantization}",
        dtype=dtype,
        layout=LAYOUT,
        page_size=page_size,
        page_bytes=config.page_bytes(dtype, page_size),
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )


def _weights_digest(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER_BYTES + 1
            if length > MAX_HEADER_BYTES:
                raise EngineError(f"{path} is not a safetensors file, or is cut short")
            header = file.read(length)
            size = os.fstat(file.fileno()).st_size
            sampled = _sampled(file.fileno(), size)
        digest.update(f"{path.name}\0{size}\0".encode() + header + sampled)
    return digest.hexdigest()[:32]


def _sampled(fd: int, size: int) -> bytes:
    """Digest of both ends of a file and of blocks between; of all of it when it is small."""
    hasher = xxhash.xxh3_128()
    if size <= 2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES:
        hasher.update(os.pread(fd, size, 0))
        return hasher.digest()
    between = size - 2 * EDGE_BYTES - SAMPLE_BYTES
    places = [(EDGE_BYTES + between * number // (SAMPLES - 1), SAMPLE_BYTES) for number in range(SAMPLES)]
    for at, count in [(0, EDGE_BYTES), *places, (size - EDGE_BYTES, EDGE_BYTES)]:
        hasher.update(os.pread(fd, count, at))
    return hasher.digest()
