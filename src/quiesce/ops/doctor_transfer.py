"""Every transfer engine on this machine: is it here, what its lane can prove, and does it hold on scratch memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quiesce.ops import doctor_ack
from quiesce.ops.doctor_finding import Finding, fail, ok, warn
from quiesce.options import HandOffOptions
from quiesce.roles.settings import new_epoch
from quiesce.transfer import registry
from quiesce.transfer.interface import Capabilities, Transport
from quiesce.transfer.leaving import leave
from quiesce.transfer.tcp_tls import Tls

LANES = {"nixl": ("tcp", "cma", "rc"), "mooncake": ("tcp", "rdma")}
RDMA_LANES = ("rc", "rdma")
PATIENCE = 60.0  # seconds for one engine: its libraries may take long to load

# What a lane says of itself: {"error" | "missing": text} or {"caps": {...}, "wrong": [...], "abort": {...}}.
Said = Mapping[str, Any]


def labels(asked: str) -> list[str]:
    """Every engine and lane that could be used here, the one asked for first."""
    devices = registry.rdma_devices()
    found = [] if asked == registry.AUTO else [asked]
    for name in registry.names():
        lanes = [lane for lane in LANES.get(name, ()) if devices or lane not in RDMA_LANES]
        for label in [f"{name}/{lane}" for lane in lanes] or [name]:
            if name != "null" and label not in found and name != asked:
                found.append(label)
    return found


def try_lane(label: str, run_dir: Path, hand_off: HandOffOptions) -> dict[str, Any]:
    """Its capabilities, what its self-test found wrong, and a real abort over it."""
    tls = (hand_off.transfer_tls_cert, hand_off.transfer_tls_key, hand_off.transfer_tls_ca)

    def make(epoch: int) -> Transport:
        setup = registry.Setup(
            run_dir=run_dir,
            epoch=epoch,
            host=hand_off.transfer_bind or None,
            direction=hand_off.direction,
            tls=None if None in tls else Tls(*tls),  # type: ignore[arg-type]
        )
        return registry.make(label, setup)

    try:
        engine = make(new_epoch())
    except registry.MissingEngine as error:
        return {"missing": str(error)}
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    try:
        wrong = engine.self_test()
    finally:
        engine.close_all()
    said: dict[str, Any] = {"caps": asdict(engine.caps), "wrong": wrong}
    direction = hand_off.direction
    if (engine.caps.push if direction == "push" else engine.caps.pull) and not wrong:
        said["abort"] = asdict(doctor_ack.abort(make, direction))
    return said


def in_process_of_its_own(label: str, hand_off: HandOffOptions) -> Said:
    """An engine's library may crash, or hang: that is a finding, and not the end of the doctor."""
    words = [sys.executable, "-m", "quiesce.ops.doctor_transfer", label, json.dumps(asdict(hand_off), default=str)]
    try:
        ended = subprocess.run(words, capture_output=True, timeout=PATIENCE, check=False, env=_environment())
    except subprocess.TimeoutExpired:
        return {"error": f"it did not come to an end within {PATIENCE:g} s"}
    try:
        said: Said = json.loads(ended.stdout.decode().strip().splitlines()[-1])
        return said
    except (ValueError, IndexError):
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        return {"error": f"its process {_ended(ended.returncode)}: {last[0][:300]}"}


def _environment() -> dict[str, str]:
    return {**os.environ, "UCX_LOG_LEVEL": os.environ.get("UCX_LOG_LEVEL", "fatal")}


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def findings(label: str, said: Said, hand_off: HandOffOptions) -> Iterator[Finding]:
    """What one lane's words mean for who asked for `hand_off.transfer`."""
    name = f"transfer {label}"
    wanted = label == hand_off.transfer
    bad = fail if wanted else warn
    if "missing" in said:
        if wanted:
            yield fail(name, said["missing"], "Install it, or use another --transfer.")
        else:
            yield ok(name, f"not used: {said['missing']}")
        return
    if "error" in said:
        yield bad(name, said["error"], "Use another --transfer; `auto` goes without it.")
        return
    caps = Capabilities(**said["caps"])
    if said["wrong"]:
        fix = f"Do not use it here. quiesce conformance {label} says more."
        yield bad(name, f"its self-test failed: {'; '.join(said['wrong'])}", fix)
        return
    yield _fit(name, caps, hand_off, wanted)
    if "abort" in said:
        yield ack(label, doctor_ack.Told(**said["abort"]), wanted)


def _fit(name: str, caps: Capabilities, hand_off: HandOffOptions, wanted: bool) -> Finding:
    found = shown(caps)
    if not (caps.pull if hand_off.direction == "pull" else caps.push):
        return (fail if wanted else warn)(name, f"{found}; no {hand_off.direction}", "Use another --direction.")
    if caps.drain == "none" and not hand_off.allow_unproven:
        fix = "Use another --transfer, or accept retained pages with --allow-unproven."
        return (fail if wanted else warn)(name, f"{found}; it cannot prove that a post has ended", fix)
    if not caps.measured:
        return warn(name, found, f"Measure this lane before you rely on it: quiesce conformance {caps.label}")
    return ok(name, found)


def shown(caps: Capabilities) -> str:
    ways = " and ".join(way for way, can in (("push", caps.push), ("pull", caps.pull)) if can)
    cost = f" ({caps.fence_cost})" if caps.fence != "none" else ""
    measured = "measured" if caps.measured else "not measured"
    return f"{ways}; drain {caps.drain}, fence {caps.fence}{cost}; {measured}; self-test passed"


def ack(label: str, told: doctor_ack.Told, wanted: bool) -> Finding:
    name = f"ack path {label}"
    if told.drained:
        how = ", ".join(told.answers).replace("DRAINED", "then DRAINED" if len(told.answers) > 1 else "DRAINED")
        return ok(name, f"{told.posts} posts, ABORT answered {how}; pages back after {told.milliseconds:.1f} ms")
    said = told.trouble or f"closed by {told.closed_by or 'nothing'} after {told.posts} posts"
    answers = ", ".join(told.answers) or "no answer"
    fix = f"Do not use it here: holds would wait for a fence. quiesce conformance {label} says more."
    return (fail if wanted else warn)(name, f"an abort brought no DRAINED: {said} ({answers})", fix)


def chosen(made: list[Finding], hand_off: HandOffOptions) -> Finding:
    """`auto` needs one engine of its list that has passed; a name needs that one."""
    able = [label for label in registry.candidates() if _passed(made, label)]
    if hand_off.transfer != registry.AUTO:
        able = [hand_off.transfer] if _passed(made, hand_off.transfer) else []
    if not able:
        return fail(
            "transfer", f"--transfer {hand_off.transfer}: no engine has passed", "Mend one of those named above."
        )
    across = "" if hand_off.transfer_bind else "; within this machine (for others: --transfer-bind ADDRESS)"
    return ok("transfer", f"--transfer {hand_off.transfer} would use {' or '.join(able)}{across}")


def _passed(made: list[Finding], label: str) -> bool:
    about = [finding for finding in made if finding.name in (f"transfer {label}", f"ack path {label}")]
    used = [finding for finding in about if not finding.found.startswith("not used")]
    return bool(used) and all(finding.status == "ok" for finding in used)


def transfers(hand_off: HandOffOptions) -> list[Finding]:
    made: list[Finding] = []
    for label in labels(hand_off.transfer):
        made += findings(label, in_process_of_its_own(label, hand_off), hand_off)
    return [*made, chosen(made, hand_off)]


def main(label: str, options: str) -> int:
    """The process of one lane."""
    given = json.loads(options)
    for name in ("transfer_tls_cert", "transfer_tls_key", "transfer_tls_ca"):
        given[name] = Path(given[name]) if given[name] else None
    with tempfile.TemporaryDirectory(prefix="quiesce-doctor-") as folder:
        print(json.dumps(try_lane(label, Path(folder), HandOffOptions(**given))), flush=True)
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    leave(code)
    sys.exit(code)
