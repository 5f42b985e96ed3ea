"""A folder of keys as workers and router use it: NAME.key for who runs here, ring/NAME.pub for who may connect, and,
where `quiesce keys` made it, tls/ with the host's certificate."""

from __future__ import annotations

import datetime
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import zmq
from cryptography import x509
from zmq.utils import z85

from quiesce.channel import KeyPair
from quiesce.channel.tls import Certificates
from quiesce.ops.doctor_finding import Finding, fail, ok, warn

WARN_DAYS = 30


def keys(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield fail("keys", f"there is no folder {folder}", "Give the folder that --keys of workers and router names.")
        return
    yield modes(folder)
    pairs, damage = _pairs(folder)
    yield damage
    yield ring(folder / "ring", pairs)
    tls = Certificates.of(folder)
    if tls is not None:
        yield certificate(tls)


def modes(folder: Path) -> Finding:
    """Secrets are for their owner alone, and nobody else may put a key into the ring."""
    me = os.getuid()
    keys = [*folder.glob("*.key"), *folder.glob("tls/*.key")]
    secret = [path for path in keys if stat.S_IMODE(path.stat().st_mode) & 0o077]
    if secret:
        names = " ".join(str(path) for path in secret)
        return fail("key modes", f"others can read {_names(secret)}", f"chmod 600 {names}; then make new keys.")
    known = [folder, folder / "ring", folder / "tls", *folder.glob("ring/*.pub"), *folder.glob("tls/*.pem")]
    open_to_all = [path for path in known if path.exists() and path.stat().st_mode & 0o022]
    if open_to_all:
        names = " ".join(map(str, open_to_all))
        return fail("key modes", f"others can add or change keys: {_names(open_to_all)}", f"chmod go-w {names}")
    foreign = [path for path in keys if path.stat().st_uid != me]
    if foreign:
        return warn("key modes", f"of another user: {_names(foreign)}", "Run doctor as the user who serves.")
    return ok("key modes", f"0600 and 0700 in {folder}")


def certificate(tls: Certificates) -> Finding:
    """The host's certificate, tried in a handshake with itself, and for how long it is in force."""
    again = "Make it again with `quiesce keys host --renew` and restart what uses it."
    try:
        tls.try_out()
        made = x509.load_pem_x509_certificate(tls.cert.read_bytes())
    except (OSError, ValueError) as error:
        return fail("certificate", str(error), again)
    left = (made.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    said = f"{tls.cert}: in force until {made.not_valid_after_utc:%Y-%m-%d}, {left} days"
    return warn("certificate", said, again) if left < WARN_DAYS else ok("certificate", said)


def _pairs(folder: Path) -> tuple[dict[str, str], Finding]:
    """Name -> public key."""
    found: dict[str, str] = {}
    wrong = []
    for path in sorted(folder.glob("*.key")):
        try:
            found[path.stem] = KeyPair.load(path).public
        except (OSError, ValueError, zmq.ZMQError) as error:
            wrong.append(f"{path.name}: {error}")
    if wrong:
        return found, fail("key pairs", "; ".join(wrong), "Make these pairs again and give out their public halves.")
    if not found:
        return found, fail("key pairs", f"no NAME.key in {folder}", "Make a pair for each process that runs here.")
    return found, ok("key pairs", f"{len(found)} whole: {', '.join(found)}")


def ring(folder: Path, pairs: dict[str, str]) -> Finding:
    """Who may connect: readable keys, each once, and those of our own pairs as the pairs have them."""
    if not folder.is_dir():
        return fail("key ring", f"there is no {folder}: everybody is refused", "Put NAME.pub of each process there.")
    public = {path.stem: path.read_text("ascii", errors="replace").strip() for path in folder.glob("*.pub")}
    bad = sorted(name for name, key in public.items() if not _is_key(key))
    if bad:
        return fail("key ring", f"no public keys: {', '.join(bad)}", "Copy the first line of NAME.key to NAME.pub.")
    stale = sorted(name for name, key in pairs.items() if public.get(name, key) != key)
    if stale:
        return fail("key ring", f"of an older pair: {', '.join(stale)}", "Replace NAME.pub here and on all hosts.")
    twice = sorted(name for name, key in public.items() if Counter(public.values())[key] > 1)
    if twice:
        return fail("key ring", f"one key under several names: {', '.join(twice)}", "Make a pair for each process.")
    out = sorted(pairs.keys() - public.keys())
    if out:
        return warn("key ring", f"not in the ring, so refused here: {', '.join(out)}", "Add their NAME.pub.")
    return ok("key ring", f"{len(public)} may connect: {', '.join(sorted(public))}")


def _is_key(text: str) -> bool:
    try:
        return len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeEncodeError):
        return False


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
