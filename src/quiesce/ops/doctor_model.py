"""The model as it lies on disk, and pools against its context, without loading a weight."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from quiesce.core.admission import pages_for, refuse_pool
from quiesce.engine.config import ModelConfig, read_config
from quiesce.engine.errors import EngineError
from quiesce.engine.fingerprint import LAYOUT
from quiesce.engine.weights import weight_files
from quiesce.models import hub, smollm2
from quiesce.models.errors import ModelError
from quiesce.models.folder import check_folder
from quiesce.models.manifest import fault
from quiesce.ops.doctor_finding import Finding, fail, ok, warn
from quiesce.options import EngineOptions, SizeOptions

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def model(name: str) -> tuple[Path | None, Finding]:
    """Where it is, without fetching anything, and whether it is whole."""
    try:
        folder = _here(name)
        if folder is None:
            return None, _absent(name)
        check_folder(folder)
    except ModelError as error:
        return None, fail("model", error.what, error.remedy)
    files = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return folder, ok("model", f"{name}: whole, {files / 1e6:,.0f} MB in {folder}")


def _here(name: str) -> Path | None:
    """Raises ModelError for what no model can be."""
    if name == smollm2.NAME:
        folder = smollm2.folder_of(smollm2.cache_root())
        if not folder.is_dir():
            return None
        if (damage := fault(folder, hashes=False)) is not None:
            raise ModelError(f"{name} in the cache is damaged: {damage}.", f"Run: quiesce model pull {name}")
        return folder
    path = Path(name).expanduser()
    if path.is_dir() or name.startswith(("/", ".", "~")):
        return path.resolve()
    match = hub.HUB_ID.fullmatch(name)
    if match is None:
        raise ModelError(f"There is no model {name!r}.", f"Name {smollm2.NAME}, a folder, or a hub id (org/name).")
    try:
        return hub.snapshot(match["repo"], match["revision"], local=True)
    except ModelError:
        return None


def _absent(name: str) -> Finding:
    """Not here yet: can it be put here?"""
    if name != smollm2.NAME:
        return warn("model", f"{name} is not in the local cache", f"Run: quiesce model pull {name}")
    cache = smollm2.cache_root()
    at = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(at, os.W_OK):
        return fail("model", f"the cache folder {cache} cannot be written", "Set QUIESCE_CACHE to one that can.")
    try:
        smollm2.need_space(at)
    except ModelError as error:
        return fail("model", error.what, error.remedy)
    free = shutil.disk_usage(at).free
    return warn("model", f"{name} is not here yet; {free / 1e9:.0f} GB free in {at}", f"quiesce model pull {name}")


def sizes(folder: Path, asked: SizeOptions, engine: EngineOptions, workers: int) -> Iterator[Finding]:
    """Layout, pools against context, memory; the layout's failure ends it, because nothing else is known then."""
    try:
        config = read_config(folder)
    except EngineError as error:
        yield fail("layout", str(error), "Serve a model of a family that the engine runs.")
        return
    yield layout(config, asked, engine)
    yield pool(config, asked)
    yield memory(config, folder, asked, engine, workers, available(), total())


def layout(config: ModelConfig, asked: SizeOptions, engine: EngineOptions) -> Finding:
    """What all workers must share before a page of one means anything to another."""
    if asked.page_size < 1:
        return fail("layout", f"--page-size is {asked.page_size}", "Give at least 1.")
    shape = f"{config.layers} layers x {config.kv_heads} KV heads x {config.head_dim}"
    size = config.page_bytes(engine.dtype, asked.page_size)
    page = f"{asked.page_size} tokens of {engine.dtype} are {size} bytes"
    return ok("layout", f"{LAYOUT}: {shape}, a page of {page}; the same on all workers")


def pool(config: ModelConfig, asked: SizeOptions) -> Finding:
    """Guard D3, as at start-up, and whether one held request makes all others wait."""
    own, page = config.context_length, max(asked.page_size, 1)
    context = asked.context_length or own
    if context > own:
        return fail("pool", f"--context-length {context}, the model's own limit is {own}", f"Lower it to {own}.")
    tokens = asked.pool_tokens(own) // page * page
    if refuse_pool(context, tokens, "KV") is not None:
        need = pages_for(context, page) * page
        return fail(
            "pool",
            f"{tokens} tokens; the context is {context}: an allowed prompt could never be placed",
            f"Raise --max-total-tokens to at least {need}, or lower --context-length to at most {tokens}.",
        )
    longest = pages_for(context, page)
    found = f"{tokens // page} pages; the longest request takes {longest}, so {tokens // page // longest} fit"
    if tokens < 2 * context:
        return warn("pool", found, f"One held request can stop all others: --max-total-tokens {2 * longest * page}.")
    return ok("pool", found)


def memory(
    config: ModelConfig, folder: Path, asked: SizeOptions, engine: EngineOptions, workers: int, free: int, most: int
) -> Finding:
    """Pools and weights of all workers of this machine; `free` and `most` in bytes, of machine or cgroup."""
    pages = asked.pool_tokens(config.context_length) // max(asked.page_size, 1)
    pools = workers * pages * config.page_bytes(engine.dtype, max(asked.page_size, 1))
    weights = workers * sum(path.stat().st_size for path in weight_files(folder))
    found = f"{workers} workers: pools {_gib(pools)}, weights {_gib(weights)}; {_gib(free)} free of {_gib(most)}"
    if engine.device != "cpu":
        found += f"; weights and pools are on {engine.device}, the pools mirrored here"
        weights = 0
    if pools > most:
        return fail("memory", found, "Lower --max-total-tokens: the pools alone are more than there is.")
    if pools + weights > free:
        return warn("memory", found, "Lower --max-total-tokens, run fewer workers here, or end something else.")
    return ok("memory", found)


def available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, total())
    return total()


def total() -> int:
    """Of the machine, or of the container where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.is_file() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine


def absent(name: str) -> Finding:
    return warn("pool", f"not compared with the context: {name} is not here", f"Run: quiesce model pull {name}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
