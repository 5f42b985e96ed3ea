"""A failing run as a comic strip: one line an event, only what concerns the requests and workers of the damage."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from quiesce.core.ledger import Change
from quiesce.core.messages import Cancel, Leg, Ping, Refused, TransferId, Wire
from quiesce.core.posting import Outcome
from quiesce.core.proofs import Borrowing, Proof
from quiesce.lab.sim.cluster import Broken, Cluster
from quiesce.lab.sim.nic import Flight

MOST = 60  # lines that are told
OUTCOMES = {
    Outcome.PLACED: "is placed",
    Outcome.FAILED_CLEAN: "fails, and nothing more of it lands",
    Outcome.UNKNOWN: "ends UNKNOWN: its bytes may still land",
}
BEFALLS = {
    "dies": "{who} dies",
    "starts": "{who} starts",
    "drains": "{who} drains and ends: too many of its pages are retained",
    "stops": "{who} stops for {0:.1f} s",
    "stall": "what {who} posts is stalled for {0:.1f} s",
    "mover": "{who}'s mover dies",
}


class Line(NamedTuple):
    at: float
    who: str
    text: str
    tid: TransferId | None
    rid: str | None = None


class Story:
    """Attach it to a cluster before it runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lines: list[Line] = []
        self.names: dict[TransferId, str] = {}
        cluster.told = self._befalls
        cluster.net.heard = self._heard
        cluster.nic.said = self._nic

    def _say(self, who: str, text: str, tid: TransferId | None, rid: str | None = None) -> None:
        self.lines.append(Line(self.cluster.loop.now, who, text, tid, rid))

    def _who(self, epoch: int) -> str:
        party = self.cluster.nic.parties.get(epoch)
        return "somebody" if party is None else f"{party.name}{chr(39) * (party.life - 1)}"

    # ------------------------------------------------------------ what happens

    def _befalls(self, what: str, process: Any, *more: Any) -> None:
        if what == "cut":
            self._say(more[0].who[0], f"{' and '.join(more[0].who)} are cut off for {more[0].seconds:.1f} s", None)
        elif what == "storm":
            self._say("", "every client leaves", None)
        else:
            if what == "starts":
                process.shadow.observed = partial(self._changed, process)
            who = self._who(process.epoch)
            self._say(process.name, BEFALLS[what].format(*more, who=who), None)

    def _heard(self, speaker: str, hearer: str, message: Wire) -> None:
        leg = getattr(message, "leg", None)
        kind = type(message).__name__.upper().replace("NEVERSTARTED", "NEVER_STARTED")
        if isinstance(leg, Leg):
            reason = f", {message.reason}" if isinstance(message, Refused) else ""
            self._say(hearer, f"{hearer} hears {kind}({{{leg.tid}}}{reason}) from {speaker}", leg.tid)
        elif isinstance(message, Ping):
            listed = ", ".join(map(str, message.open_seqs)) or "none"
            self._say(
                hearer, f"{hearer} hears PING from {speaker}: open up to {message.high}: {listed}", None, "ping"
            )
        elif isinstance(message, Cancel):
            self._say(hearer, f"{hearer} is told to cancel {message.rid}: {message.reason}", None, message.rid)

    def _changed(self, process: Any, change: Change) -> None:
        event, tid, _, lease, closed_by = change
        who = self._who(process.epoch)
        pages = sorted(change.pages)
        if closed_by is not None:
            proof = closed_by.kind.value.upper() if isinstance(closed_by, Proof) else "NO PROOF"
            if proof != "COMPLETED" or not process.prefill:
                self._say(process.name, f"{who} closes a lease on {{{tid}}}: {proof}", tid)
            return
        if lease is not None:
            if lease.key.kind is Borrowing.WRITE:
                self._say(process.name, f"{who} lends {_pages(pages)} of {{{tid}}} to be written", tid)
            return
        text = {
            "owned": f"{who} takes {_pages(pages)} for {{{tid}}}",
            "grown": f"{who} takes {_pages(pages)} more for {{{tid}}}",
            "ended": f"{who} gives {{{tid}}} up, or is done with it",
            "retained": f"{who} retains {_pages(pages)} of {{{tid}}}: no proof is to be had",
            "returned": f"{who}: {_pages(pages)} of {{{tid}}} free again",
        }.get(event)
        if event == "owned":
            rid = process.worker.rid_of(tid)
            self.names.setdefault(tid, "" if rid is None else rid)
        if text is not None:
            self._say(process.name, text, tid)

    def _nic(self, what: str, flight: Flight, detail: Any = None) -> None:
        poster, lender = self._who(flight.conn.owner.epoch), self._who(flight.conn.lender)
        name, target, source = f"{{{flight.leg.tid}}}", _pages(flight.target), _pages(flight.source)
        there = f"{target} of {poster if flight.read else lender}"
        post = f"{poster} reads {name}: {source} of {lender} into {target}" if flight.read else ""
        text = {
            "posted": post or f"{poster} posts {name} into {there}",
            "told": f"{poster} hears that its {'read' if post else 'post'} of {name} {OUTCOMES.get(detail, detail)}",
            "raised": f"{poster}'s {'read' if post else 'post'} of {name} raises; it is under way all the same",
            "lands": f"bytes of {name} land in {there}",
        }[what]
        self._say(poster.rstrip("'"), text, flight.leg.tid)

    # ------------------------------------------------------------ telling

    def tell(self, broken: Broken) -> list[str]:
        tids = [tid for tid in (broken.tid, broken.other) if tid is not None]
        letters = {tid: chr(ord("A") + index) for index, tid in enumerate(tids)}
        mine = [line for line in self.lines if line.tid in letters]
        if not mine:
            mine = self.lines[-MOST:]
        begin, workers = mine[0].at, {line.who for line in mine} | {broken.who}
        chosen = [
            line
            for line in self.lines
            if line.at >= begin
            and (line.tid in letters or (line.tid is None and line.rid is None and line.who in {"", *workers}))
        ]
        told: list[str] = []
        for line in chosen:
            text = _named(line.text, letters)
            if told and told[-1].split("  ", 1)[1].removesuffix(" (and again)") == text:
                told[-1] = f"{line.at:8.3f}  {text} (and again)"
            else:
                told.append(f"{line.at:8.3f}  {text}")
        if len(told) > MOST:
            told = [*told[:10], f"          ... {len(told) - MOST} lines left out ...", *told[10 - MOST :]]
        page = "" if broken.page is None else f" (page {broken.page})"
        owner = f", which belongs to {letters[broken.other]}" if broken.other is not None else ""
        about = f", {letters[broken.tid]}" if broken.tid is not None else ""
        told.append(f"{broken.at:8.3f}  BROKEN at {broken.who}{about}{page}{owner}: {broken.rule}")
        return told


def _named(text: str, letters: dict[TransferId, str]) -> str:
    for tid, letter in letters.items():
        text = text.replace(f"{{{tid}}}", letter)
    return text


def _pages(pages: Iterable[int]) -> str:
    found = list(pages)
    shown = ", ".join(map(str, found[:6])) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return f"page {shown}" if len(found) == 1 else f"pages {shown}"
