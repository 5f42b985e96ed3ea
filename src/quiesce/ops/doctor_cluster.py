"""A running cluster, asked over HTTP: can it serve, does work pass through every worker, do all pages come back."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from quiesce.ops.doctor_finding import Finding, fail, ok, warn

SECONDS = 15.0  # for one page; a probe takes up to 5
LONGEST = 16 << 20  # bytes of one page
PROBED = "/health?probe=1"
PAGES = ("/health", PROBED, "/v1/models", "/debug/ledger", "/metrics")
HEARTBEAT = 5.0  # seconds after which a worker's silence is worth a word


@dataclass(frozen=True)
class Answers:
    """By path: what came, JSON or for /metrics text; its HTTP status; or why nothing came."""

    body: dict[str, Any] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)


def ask(
    url: str, key: str, transport: httpx2.BaseTransport | None = None, tls: ssl.SSLContext | None = None
) -> Answers:
    """Fetches every page; one that cannot be had is noted. `tls`: with the certificate that we show."""
    answers = Answers()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx2.Client(headers=headers, timeout=SECONDS, transport=transport, verify=tls or True) as client:
        for path in PAGES:
            try:
                answers.status[path], answers.body[path] = _fetched(client, url.rstrip("/"), path)
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
                answers.trouble[path] = str(error) or type(error).__name__
                if path == PAGES[0]:
                    break  # nobody there: the others would wait for the same
    return answers


def _fetched(client: httpx2.Client, url: str, path: str) -> tuple[int, Any]:
    """Raises ValueError for what is too long or no JSON."""
    with client.stream("GET", url + path) as answer:
        body = b""
        for chunk in answer.iter_bytes():
            body += chunk
            if len(body) > LONGEST:
                raise ValueError(f"the answer is longer than {LONGEST} bytes")
        if path == "/metrics":
            return answer.status_code, body.decode("utf-8", errors="replace")
        return answer.status_code, json.loads(body)


def findings(answers: Answers) -> Iterator[Finding]:
    if "/health" not in answers.body:
        said = answers.trouble.get("/health", "no answer")
        yield fail("reach router", said, "Is the router running there? Check --url, firewall and --host.")
        return
    health = answers.body["/health"]
    if not isinstance(health, Mapping) or not isinstance(health.get("workers"), list):
        yield fail("reach router", "what answers is not a router of Quiesce", "Give its address with --url.")
        return
    yield ok("reach router", f"answers; {len(health['workers'])} workers, {health.get('requests', 0)} requests")
    yield _health(health, answers.status["/health"])
    yield _versions(health)
    probed = answers.body.get(PROBED)
    newest = probed if isinstance(probed, Mapping) and isinstance(probed.get("workers"), list) else health
    yield _heartbeats(newest)
    yield _cautions(newest)
    yield _probes(answers)
    yield _limits(health, answers)
    yield from _ledgers(answers)
    yield _metrics(answers)


def _health(health: Mapping[str, Any], status: int) -> Finding:
    if status == 200:
        return ok("cluster health", str(health.get("status")))
    still = health.get("nothing_moved_for")
    why = [*health.get("missing", []), *([f"nothing has moved for {still} s"] if still else [])]
    fix = "Start what is missing; for `stuck` look at the logs of the workers that are named below."
    return fail("cluster health", f"{health.get('status')}: {'; '.join(why) or 'no reason given'}", fix)


def _versions(health: Mapping[str, Any]) -> Finding:
    """The router compares protocol, model, weights, layout and page size of each pair when workers register."""
    wrong = health.get("mismatches", [])
    if wrong:
        return fail(
            "cluster layouts", "; ".join(wrong), "Start those workers with the same model, sizes and version."
        )
    return ok("cluster layouts", "all pairs of workers agree")


def _heartbeats(health: Mapping[str, Any]) -> Finding:
    """From the workers to the router."""
    bad = [f"{worker['name']}: {worker['trouble']}" for worker in health["workers"] if worker.get("trouble")]
    if bad:
        fix = "Look at their logs; a worker that cannot be mended is restarted by `quiesce serve`."
        return fail("workers to router", "; ".join(bad), fix)
    late = [worker["name"] for worker in health["workers"] if worker.get("heartbeat_seconds_ago", 0.0) > HEARTBEAT]
    if late:
        return warn("workers to router", f"silent for {HEARTBEAT:g} s: {', '.join(late)}", "Check network and load.")
    return ok("workers to router", "every worker is heard")


def _cautions(health: Mapping[str, Any]) -> Finding:
    said = [f"{worker['name']}: {text}" for worker in health["workers"] for text in worker.get("cautions", [])]
    if said:
        return warn("cautions", "; ".join(said), "Each names the option or the state behind it.")
    return ok("cautions", "none")


def _probes(answers: Answers) -> Finding:
    """From the router to every worker and back, through machine, pages and engine."""
    body = answers.body.get(PROBED)
    probes = body.get("probes") if isinstance(body, Mapping) else None
    if not probes:
        said = answers.trouble.get(PROBED, "no worker was probed")
        return fail("router to workers", said, "Start workers, and let them reach the router's registry.")
    bad = [f"{name}: {answer}" for name, answer in probes.items() if isinstance(answer, str)]
    if bad:
        fix = "Those workers do not work through a request: see their logs, then restart them."
        return fail("router to workers", "; ".join(bad), fix)
    slowest = max(probes, key=lambda name: probes[name])
    return ok("router to workers", f"{len(probes)} probes passed, the slowest {slowest} in {probes[slowest]:.2f} s")


def _limits(health: Mapping[str, Any], answers: Answers) -> Finding:
    """What is shown to clients against what every worker can take (guard D3)."""
    least = [min(worker["context_length"], worker["pool_tokens"]) for worker in health["workers"]]
    small = [
        f"{worker['name']} has a pool of {worker['pool_tokens']} for a context of {worker['context_length']}"
        for worker in health["workers"]
        if worker["pool_tokens"] < worker["context_length"]
    ]
    models = answers.body.get("/v1/models")
    if answers.status.get("/v1/models") != 200 or not isinstance(models, Mapping) or not models.get("data"):
        why = answers.trouble.get("/v1/models") or f"status {answers.status.get('/v1/models')}"
        return warn("cluster limits", f"/v1/models was not to be had: {why}", "Give an API key with --key.")
    shown = models["data"][0].get("max_model_len")
    if small:
        return fail("cluster limits", "; ".join(small), "Raise --max-total-tokens or lower --context-length there.")
    if shown is None or not least:
        return fail("cluster limits", "/v1/models shows no limit: nothing is usable", "Start prefill and decode.")
    if shown != health.get("context_limit"):
        fix = "It changes while workers come and go: ask again."
        return warn("cluster limits", f"/v1/models says {shown}, /health {health.get('context_limit')}", fix)
    if len(set(least)) > 1:
        fix = "Give all workers the same --context-length and --max-total-tokens."
        return warn("cluster limits", f"workers take {min(least)} to {max(least)} tokens; {shown} is shown", fix)
    return ok("cluster limits", f"{shown} tokens of prompt and answer, the same everywhere")


def _ledgers(answers: Answers) -> Iterator[Finding]:
    path = "/debug/ledger"
    ledgers = answers.body.get(path)
    if answers.status.get(path) != 200 or not isinstance(ledgers, Mapping):
        why = answers.trouble.get(path) or f"status {answers.status.get(path)}"
        yield warn("ledgers", f"{path} was not to be had: {why}", "Give a key with admin = true, with --key.")
        return
    silent = sorted(name for name, ledger in ledgers.items() if "error" in ledger)
    if silent:
        yield fail("ledgers", f"no answer from {', '.join(silent)}", "See the logs of those workers.")
    whole = {name: ledger for name, ledger in ledgers.items() if "pages" in ledger}
    unsound = [f"{name}: {ledger['unsound']}" for name, ledger in whole.items() if ledger.get("unsound")]
    if unsound:
        fix = "Leave out --on-hold-expiry=release, then restart."
        yield fail("proofs", f"leases closed without proof: {'; '.join(unsound)}", fix)
    retained = {name: ledger["pages"]["retained"] for name, ledger in whole.items() if ledger["pages"]["retained"]}
    held = {name: ledger["pages"]["held"] for name, ledger in whole.items() if ledger["pages"]["held"]}
    if retained:
        said = ", ".join(f"{name} {count}" for name, count in retained.items())
        fix = "Only a restart of those workers gives them back; docs/transports.md says which engines avoid it."
        yield fail("retained pages", f"no proof is to be had: {said}", fix)
    elif not silent:
        waiting = f"; {sum(held.values())} wait for proof now" if held else ""
        yield ok("retained pages", f"none in {len(whole)} ledgers{waiting}")


def _metrics(answers: Answers) -> Finding:
    text = answers.body.get("/metrics")
    if answers.status.get("/metrics") != 200 or not isinstance(text, str):
        why = answers.trouble.get("/metrics") or f"status {answers.status.get('/metrics')}"
        return fail("metrics", f"/metrics was not to be had: {why}", "Check what stands between here and the router.")
    samples = re.findall(r"^(quiesce:\S+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    negative = [name for name, value in samples if value.startswith("-")]
    if not samples or negative:
        what = f"negative: {', '.join(negative[:5])}" if negative else "no sample of quiesce: among them"
        return fail("metrics", what, "Report this with `--bundle FILE`.")
    return ok("metrics", f"{len(samples)} samples, none negative")
