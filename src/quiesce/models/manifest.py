"""The manifest of a prepared model folder: what each file must weigh and hash to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

MANIFEST = "quiesce-manifest.json"
FORMAT = 1
BLOCK = 4 * 1024 * 1024


def sha256_of(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Return the hex sha256 of a file; `advance` hears of each block's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def write_manifest(folder: Path, source: dict[str, str], advance: Callable[[int], None]) -> None:
    """Hash every file of `folder` into its manifest and force all of it to disk, the manifest last."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path, advance)}
        force(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "source": source, "files": files}, indent=1) + "\n")
    force(manifest)
    force(folder)


def fault(folder: Path, hashes: bool, advance: Callable[[int], None] = lambda _: None) -> str | None:
    """Say what is wrong with a prepared folder, or None. Sizes always; contents only when `hashes`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return f"its manifest has format {manifest['format']!r}, this version writes {FORMAT}"
        wanted = {str(name): (int(file["bytes"]), file["sha256"]) for name, file in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"its manifest cannot be read ({error})"
    for name, (size, digest) in wanted.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            return f"{name} is missing" if actual is None else f"{name} has {actual:,} bytes, not {size:,}"
        if hashes and sha256_of(path, advance) != digest:
            return f"the contents of {name} have changed (sha256 differs)"
    return None


def force(path: Path) -> None:
    """fsync a file or folder, so that a later rename never shows a name before its contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
