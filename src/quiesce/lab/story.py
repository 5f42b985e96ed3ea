"""A path through a world as a comic strip: one line an event, who does what, and what comes of it."""

from __future__ import annotations

from typing import Any

from quiesce.core.borrower import Outcome
from quiesce.core.machine import Timer
from quiesce.core.messages import Leg, Offer, Ping, Refused, Request, TransferId
from quiesce.core.ranks import Entry, Report
from quiesce.lab.checker.model import Model
from quiesce.lab.checker.processes import Event, State, Step
from quiesce.lab.checker.search import Result
from quiesce.lab.checker.sides import ANOTHER

OUTCOMES = {
    Outcome.PLACED: "is placed",
    Outcome.FAILED_CLEAN: "fails, and nothing more of it lands",
    Outcome.UNKNOWN: "ends UNKNOWN: its bytes may still land",
}
TIMERS = {
    Timer.REPEAT: "repeats what is unanswered",
    Timer.DEADLINE: "reaches the deadline of",
    Timer.HOLD: "has held long enough:",
    Timer.REFENCE: "asks again for a fence:",
    Timer.LEASE: "has not been heard by for long: the reader of",
}


class Teller:
    def __init__(self, result: Result) -> None:
        assert result.model is not None
        self.result = result
        self.model: Model = result.model
        self.names: dict[TransferId, str] = {}
        for _, _, message in self.model.messages:  # a room is the request's number in its world
            if isinstance(message, Offer | Request):
                self.names[message.leg.tid] = chr(ord("A") + message.room)

    def lines(self) -> list[str]:
        told = []
        for state, event in self.result.story:
            line = self._line(state, event)
            if line:
                told.append(line)
        return [f"{number:3}. {line}" for number, line in enumerate(told, 1)]

    # ------------------------------------------------------------ names

    def _name(self, tid: TransferId) -> str:
        return self.names.get(tid, f"request {tid.seq}" if tid.epoch else "another request")

    def _who(self, state: State, at: int) -> str:
        decodes, prefills = state[0], state[1]
        if at < len(decodes):
            epoch, many, name = self.model.views[decodes[at]].epoch - 1, len(decodes) > 1, f"D{at}"
        else:
            rank = at - len(decodes)
            epoch = self.model.views[prefills[rank]].epoch % 100
            many, name = len(prefills) > 1, f"P{rank}"
        return (name if many else name[0]) + "'" * epoch

    def _rank(self, epoch: int) -> str:
        if epoch < 100:
            return "D" + "'" * (epoch - 1)
        rank, lives = divmod(epoch, 100)
        return (f"P{rank - 1}" if self.model.world.prefills > 1 else "P") + "'" * lives

    def _pages(self, pages: Any) -> str:
        pages = list(pages)
        return f"page {pages[0]}" if len(pages) == 1 else "pages " + ", ".join(map(str, pages))

    def _message(self, number: int) -> str:
        message = self.model.messages[number][2]
        kind = type(message).__name__.upper().replace("NEVERSTARTED", "NEVER_STARTED")
        if isinstance(message, Ping):
            return f"PING (open up to {message.high}: {', '.join(map(str, message.open_seqs)) or 'none'})"
        if isinstance(message, Entry):
            what = message.what
            return f"entry {message.seq}: {type(what).__name__.upper()}({self._name(what.tid)})"
        if isinstance(message, Report):
            about = f"({self._name(message.tid)})" if message.tid is not None else ""
            return f"{(message.what or 'applied').upper()}{about} of D{message.rank}"
        reason = f", {message.reason}" if isinstance(message, Refused) else ""
        return f"{kind}({self._name(message.leg.tid)}{reason})"

    # ------------------------------------------------------------ lines

    def _line(self, state: State, event: Event) -> str:
        match event:
            case ("at", at, int(number)):
                speaker = self.model.messages[number][1]
                heard = f"{self._who(state, at)} hears {self._message(number)}"
                heard += f" from {self._rank(speaker)}" if speaker >= 100 else ""
                return heard + self._after(state, at, number)
            case ("at", at, local):
                if local[0] == "reserve":
                    return self._reserve(state, at)
                return f"{self._who(state, at)} {self._local(local)}" + self._after(state, at, local)
            case ("crash", side, rank, _):
                at = rank if side == "D" else len(state[0]) + rank
                what = "reads of its pages are" if self.model.world.pull and side == "P" else "what it posted is"
                return f"{self._who(state, at)} dies and starts again; {what} still under way"
            case ("takes", post, right):
                read = self.model.flights[post >> 2]
                whose = "its own prompt" if all(right) else "NOT its prompt"
                source = self._who(state, len(state[0]) + read.leg.p_rank)
                pages = self._pages(read.source)
                return f"the read of {self._name(read.leg.tid)} takes source {pages} of {source}: {whose}"
            case ("half", post):
                flight = self.model.flights[post >> 2]
                return f"half of {self._name(flight.leg.tid)}'s bytes are in {self._pages(flight.destination)}"
            case ("lands", post, page, holder):
                return self._lands(post, page, holder)
            case ("reads", post, page, tid):
                mine = self._name(self.model.flights[post >> 2].leg.tid)
                what = "read" if self.model.world.pull else "post"
                there = f"source page {page}, where {self._name(tid)}'s prompt is now"
                return f"the {what} of {mine} reads {there}: leaked"
            case ("uncovered", post):
                flight = self.model.flights[post >> 2]
                where = f"{self._name(flight.leg.tid)}'s bytes may still land in {self._pages(flight.destination)}"
                return f"{where}, and no lease covers them"
            case ("unlent", post):
                read = self.model.flights[post >> 2]
                what = f"the read of {self._name(read.leg.tid)} may still take source {self._pages(read.source)}"
                return f"{what}, which is not lent to it any more"
            case ("all lost",):
                return "everything under way is lost; from here on nobody disturbs"
            case ("later",):
                return "time passes, every timer fires"
        return ""

    def _reserve(self, state: State, at: int) -> str:
        side = self.model.views[self.model.local((state[0] + state[1])[at], ("reserve",)).side].side
        tid = TransferId(side.epoch, side.lender.high)
        return f"{self._who(state, at)} reserves {self._pages(side.ledger.pages(tid))} for {self._name(tid)}"

    def _lands(self, post: int, page: int, holder: tuple[TransferId, bool]) -> str:
        flight = self.model.flights[post >> 2]
        name, owner = self._name(flight.leg.tid), self._name(holder[0])
        use = f"{owner} is reading" if holder[1] else f"belongs to {owner}"
        return f"{name}'s bytes from {self._rank(flight.leg.p_epoch)} land in page {page}, which {use}: damage"

    def _local(self, event: Event) -> str:  # noqa: PLR0912 - one case an event
        match event:
            case ("publish", tid, rank):
                return f"offers {self._name(tid)}" + (f" to P{rank}" if self.model.world.prefills > 1 else "")
            case ("end", tid):
                return f"ends {self._name(tid)}: its client is gone"
            case ("fire", timer, TransferId() as tid):
                return f"{TIMERS[timer]} {self._name(tid)}"
            case ("fire", timer, Leg() as leg):
                return f"{TIMERS[timer]} {self._name(leg.tid)}"
            case ("lost", epoch):
                return f"believes that {self._rank(epoch)} is lost"
            case ("learn", _, epoch):
                return f"learns that {self._rank(epoch)} is there now"
            case ("learn", epoch):
                return f"learns of decode engine {'D' + chr(39) * (epoch - 1)}"
            case ("effect", epoch, generation, _, gone, *rest):
                pages = rest[0] if rest else ()
                if pages:
                    return f"fences {self._pages(pages)} against {self._rank(epoch)}"
                what = "knows to be gone for good" if gone else f"fences (grants up to generation {generation}):"
                return f"{what} {self._rank(epoch)}"
            case ("report", epoch, _, _, pages) if pages:
                return f"is told that {self._rank(epoch)} can write {self._pages(pages)} no more"
            case ("report", epoch, generation, *_):
                verb = "read" if self.model.world.pull else "write"
                return f"is told that {self._rank(epoch)} can {verb} no more under generation {generation}"
            case ("unfenced", epoch, _, _):
                return f"is told that no fence of {self._rank(epoch)} can be had"
            case ("verified", tid, matches):
                return f"finds the digest of {self._name(tid)} {'right' if matches else 'WRONG'}"
            case ("ping",):
                return "sends its closed set"
            case ("repeat",):
                return "says again what its engine's other ranks have not answered"
            case ("lend", tid):
                return f"computes {self._name(tid)} and lends its pages"
            case ("checked", leg, _, generation):
                found = "in force" if generation else "NOT in force"
                return f"checks what it read of {self._name(leg.tid)}: the grant is {found}"
            case ("fault", TransferId() as tid):
                return f"fails {self._name(tid)}"
            case ("start", tid):
                return f"takes source pages for {self._name(tid)}"
            case ("compute", tid, short):
                return f"computes a chunk of {self._name(tid)}" + (" and takes it for the last" if short else "")
            case ("pair", leg, pairing):
                about = "ANOTHER PROMPT" if pairing == ANOTHER else "the same prompt"
                return f"is given the request for {self._name(leg.tid)}'s room: it is about {about}"
            case ("fault", leg):
                return f"fails {self._name(leg.tid)}"
            case ("ended", leg, first, outcome):
                what = "read" if self.model.world.pull else "post"
                return f"sees its {what} {first} of {self._name(leg.tid)}: it {OUTCOMES[outcome]}"
            case ("drained", leg, proven):
                how = "is proven drained" if proven else "cannot be proven drained"
                return f"asks its transport: the connection for {self._name(leg.tid)} {how}"
        return str(event)

    # ------------------------------------------------------------ what comes of it

    def _after(self, state: State, at: int, event: Any) -> str:
        """What the step changed, from the machines themselves."""
        before = (state[0] + state[1])[at]
        step: Step = self.model.local(before, event)
        told = [self._post(number) for number in step.posts]
        told += [f"says {self._message(n)}" for n in range(step.sends.bit_length()) if step.sends >> n & 1]
        if at < len(state[0]) and step.side != before:
            told += self._lender_changes(before, step.side)
        return f" -> {', '.join(told)}" if told else ""

    def _post(self, number: int) -> str:
        flight = self.model.flights[number]
        if self.model.world.pull:
            return f"reads source {self._pages(flight.source)} into {self._pages(flight.destination)}"
        return f"posts into {self._pages(flight.destination)}"

    def _lender_changes(self, before: int, after: int) -> list[str]:
        old, new = self.model.views[before].side, self.model.views[after].side
        told = []
        for tid, transfer in old.lender.transfers.items():
            now = new.lender.transfers.get(tid)
            became = now.state.value if now is not None and now.state is not transfer.state else ""
            if became in ("holding", "quarantine") and new.ledger.knows(tid):
                told.append(f"gives up {self._name(tid)} but keeps {self._pages(old.ledger.pages(tid))}")
            elif became == "committed":
                told.append(f"commits {self._name(tid)}")
            if old.ledger.knows(tid) and not new.ledger.knows(tid):
                told.append(f"{self._pages(old.ledger.pages(tid))} free again")
        return told


def tell(result: Result) -> list[str]:
    """The story of a violation, a line an event; empty when nothing was violated."""
    if result.told:
        return [f"{number:3}. {line}" for number, line in enumerate(result.told, 1)]
    return Teller(result).lines() if result.story else []
