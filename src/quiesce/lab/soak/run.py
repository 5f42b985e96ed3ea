"""`quiesce soak`: rounds until the time is over or enough hand-offs have been cut, and a report."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from quiesce.lab.soak.clients import tenants
from quiesce.lab.soak.rounds import Findings, Soak, Tally
from quiesce.lab.soak.target import OwnCluster, Target

console = Console(highlight=False, stderr=True)
SHOWN = 5  # findings of a kind in the report
OWN = ["--deterministic", "--prefill", "2", "--max-total-tokens", "2048", "--context-length", "512"]
OWN += ["--hold-timeout", "5", "--log-level", "error"]


@dataclass(frozen=True)
class Asked:
    """What `quiesce soak` was asked for. `url` None: a cluster of our own, broken on purpose where `breaks`."""

    url: str | None
    model: str
    options: tuple[str, ...]
    key: str
    minutes: float
    aborts: int
    requests: int
    concurrency: int
    tenants: int
    seed: int
    breaks: bool
    oracle: bool
    as_json: bool
    storm: float = 0.6  # the share of clients that leave early
    out: Path | None = None  # the report so far, after each round


def soak(asked: Asked) -> int:
    """Exit code 1 on any finding."""
    began = time.monotonic()
    if asked.url is not None:
        url = asked.url.rstrip("/").removesuffix("/v1")
        done = asyncio.run(_soak(Target(url, asked.key, _has_ledger(url)), asked))
    else:
        with OwnCluster(asked.model, [*OWN, *asked.options], chaos=asked.breaks) as target:
            done = asyncio.run(_soak(target, asked))
    seconds = time.monotonic() - began
    _report(done.tally, done.findings, seconds)
    if asked.as_json:
        print(json.dumps(told(done, asked, seconds)))
    return 1 if done.findings else 0


def told(done: Soak, asked: Asked, seconds: float) -> dict[str, Any]:
    """The report as plain values."""
    load = [round(value, 2) for value in os.getloadavg()]
    machine = {"cores": len(os.sched_getaffinity(0)), "load": load}
    return {"seed": asked.seed, "seconds": seconds, "machine": machine, **vars(done.tally), **vars(done.findings)}


def _has_ledger(url: str) -> bool:
    try:
        answer = httpx2.get(f"{url}/debug/ledger", timeout=10)
        return answer.status_code == 200 and "pages" in str(answer.json())
    except (httpx2.HTTPError, ValueError):
        return False


async def _soak(target: Target, asked: Asked) -> Soak:
    draw = random.Random(asked.seed)
    limits = httpx2.Limits(max_connections=4 * asked.concurrency)
    async with httpx2.AsyncClient(base_url=target.url, timeout=120.0, limits=limits) as client:
        name = (await client.get("/v1/models", headers=_bearer(target.key))).json()["data"][0]["id"]
        soak = Soak(target, client, name, tenants(asked.tenants, draw), draw)
        soak.concurrency, soak.oracle, soak.breaks = asked.concurrency, asked.oracle, asked.breaks
        await soak.learn()
        console.print(
            f"seed {asked.seed}: {len(soak.expected)} prompts of {asked.tenants} tenants learnt from {target.url}"
        )
        began, stop = time.monotonic(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # the round is finished, and the report written
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        limit = began + 60 * asked.minutes
        while time.monotonic() < limit and not stop.is_set() and _aborts_left(soak, asked):
            await soak.round(asked.requests, storm=asked.storm)
            _progress(soak, asked, time.monotonic() - began)
            if len(soak.findings.unrest) > 20 or len(soak.findings.wrong) > 20:
                console.print("[red]too many findings to go on[/red]")
                break
    return soak


def _aborts_left(soak: Soak, asked: Asked) -> bool:
    return not asked.aborts or soak.tally.mid_transfer < asked.aborts


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _progress(soak: Soak, asked: Asked, seconds: float) -> None:
    tally, findings = soak.tally, soak.findings
    console.print(
        f"{seconds / 60:6.1f} min, round {tally.rounds}: {tally.requests} requests, {tally.answered} answered, "
        f"{tally.cut.total()} cut, {tally.mid_transfer} mid-transfer; wrong {len(findings.wrong)}, foreign "
        f"{len(findings.foreign)}, unrest {len(findings.unrest)}, failed {len(findings.failed)}",
        soft_wrap=True,
    )
    if asked.out is not None:
        asked.out.write_text(json.dumps(told(soak, asked, seconds)) + "\n", "utf-8")


def _rests(rests: list[float]) -> str:
    return f"median {statistics.median(rests):.1f}, at most {max(rests):.1f}" if rests else "-"


def _report(tally: Tally, findings: Findings, seconds: float) -> None:
    table = Table(title=f"soak, {seconds / 60:.1f} minutes", show_header=False)
    rows: list[tuple[str, Any]] = [
        ("rounds", tally.rounds),
        ("requests", tally.requests),
        ("answered, compared with the oracle", tally.answered),
        ("cut", ", ".join(f"{name} {count}" for name, count in tally.cut.items()) or "none"),
        ("hand-offs given up after their offer", tally.mid_transfer),
        ("leases closed by", ", ".join(f"{name} {count}" for name, count in tally.closed_by.items() if count) or "-"),
        ("unsound", tally.unsound),
        ("faults", ", ".join(f"{name} {count}" for name, count in tally.broken.items() if name != "none") or "none"),
        ("tries that failed meanwhile, or were turned away", tally.excused),
        ("requests never taken", tally.turned_away),
        ("seconds until every page was back", _rests(tally.rests)),
        ("wrong answers", len(findings.wrong)),
        ("foreign secrets", len(findings.foreign)),
        ("not idle afterwards", len(findings.unrest)),
        ("unexplained errors", len(findings.failed)),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    console.print(table, soft_wrap=True)
    for kind in (findings.wrong, findings.foreign, findings.unrest, findings.failed):
        for line in kind[:SHOWN]:
            console.print(f"  {line}", style="red", markup=False)
    console.print("[red]findings[/red]" if findings else "[green]clean[/green]")
