"""The findings as a table, as JSON, and packed for whoever is asked for help."""

from __future__ import annotations

import io
import json
import platform
import re
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quiesce.ops.doctor_cluster import Answers
from quiesce.ops.doctor_finding import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
FILES = {"/health": "health.json", "/debug/ledger": "ledger.json", "/v1/models": "models.json", "/metrics": "metrics"}
SECRET = re.compile(r"(?i)(://)[^/@\s]+@|(bearer )\S+")


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.status == "fail" for finding in findings))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    counts = Counter(finding.status for finding in findings)
    return {
        "quiesce": metadata.version("quiesce"),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "ok": exit_code(findings) == 0,
        "counts": {status: counts[status] for status in ("ok", "warn", "fail")},
        "checks": [{key: _clean(text) for key, text in asdict(finding).items()} for finding in findings],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        colour = COLOURS[finding.status]
        table.add_row(f"[{colour}]{finding.status}[/]", escape(finding.name), escape(_clean(finding.found)))
        if finding.fix:
            table.add_row("", "", f"[bold]-> {escape(_clean(finding.fix))}[/]")
    console.print(table)
    counts = as_json(findings)["counts"]
    console.print(f"\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} to mend.")


def bundle(file: Path, findings: Sequence[Finding], answers: Answers | None) -> None:
    """Report and, of a running cluster, its pages. No keys, no settings, no prompts: none of them holds any."""
    with tarfile.open(file, "w:gz") as archive:
        _add(archive, "report.json", json.dumps(as_json(findings), indent=2))
        for path, name in FILES.items():
            if answers is not None and path in answers.body:
                body = answers.body[path]
                _add(archive, name, _clean(body if isinstance(body, str) else json.dumps(body, indent=2)))
    file.chmod(0o600)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    entry = tarfile.TarInfo(f"quiesce-doctor/{name}")
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(data))


def _clean(text: str) -> str:
    """Without names and passwords of URLs."""
    return SECRET.sub(lambda match: (match[1] or match[2]) + ("...@" if match[1] else "..."), text)
