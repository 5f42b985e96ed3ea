"""The stage of a race: a warm cluster of real workers, gates that hold a donor's writes, and what everybody said.

Donor: the request that is cut while its write is posted. Victim: the request that gets, or waits for, its pages.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from quiesce.core.messages import Cancel, Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.process import WorkerProcess
from quiesce.lab.race.journal import Journal, Note, Reader
from quiesce.lab.worker import Faults

DECODE = "decode-0"
VICTIM = "Count from 1 to 100, separated by commas."
COUNTED = 30  # tokens of the victim before the donor's write is let go: `1, 2, 3, ... 10`
SECRET = "The secret word of tenant A is swordfish."
LOOK = 0.03  # seconds between two questions to decode
START = 240.0  # seconds for a cluster to be warm
PATIENCE = 90.0  # seconds for one thing to happen, on a machine that does something else too


@dataclass
class Run:
    """What one run of a scene showed. `shown`: the fault itself; `right`: the victim's answer is the baseline's."""

    scene: str
    safe: bool
    shown: bool
    right: bool
    said: str  # one line for the report
    notes: list[Note] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)  # transfer id -> who it is
    baseline: str = ""
    answer: str = ""
    parts_at: int | None = None  # the first token at which the answer is another
    headline: str = ""  # of the picture, where the late landing is not the point
    closed_by: str = ""  # what ended the lease of the donor's pages
    late_bytes: int = 0  # that came for pages which were not their sender's any more, and went nowhere

    @property
    def clean(self) -> bool:
        """As it must be in safe mode."""
        return self.right and not self.shown


@dataclass(frozen=True)
class Layout:
    """The sizes of a scene's cluster, in tokens."""

    prefills: int
    pool: int
    context: int
    page_size: int = 16
    prefill_pool: int = 4096  # so that the sources of one tainted transfer are a small part of it
    hold_timeout: float = 20.0


class Scene(ABC):
    """One race. `run` plays it once on a warm stage; `faults`: of the donor's prefill worker, and of decode."""

    name: str
    layout: Layout
    victim = VICTIM
    tokens: int
    cannot: dict[str, str] = {}  # noqa: RUF012  engine -> why its unsafe twin cannot show this fault

    def sizes(self, safe: bool, transfer: str) -> Layout:
        return self.layout

    def settings(self, safe: bool) -> dict[str, Any]:
        """Of every worker, besides the sizes."""
        return {}

    @abstractmethod
    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]: ...

    @abstractmethod
    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run: ...


class Stage:
    """A context manager around one scene's cluster; not `safe`: around its twin with a guard taken out."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        scene: Scene,
        safe: bool,
        *,
        transfer: str = "shm",
        log: Path,
    ) -> None:
        layout = self.layout = scene.sizes(safe, transfer)
        self.folder, self.log, self.safe, self.transfer = folder, log, safe, transfer
        self.runs = 0
        self._looked = 0.0
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
        self.gate, self.pause = folder / "gate", folder / "pause"
        self.posts, self.ledger = folder / "posts.jsonl", folder / "ledger.jsonl"
        self._reader = Reader(self.ledger, self.posts)
        self._spare: WorkerProcess | None = None
        self.cluster = Cluster(
            model,
            folder,
            log,
            context_length=layout.context,
            page_size=layout.page_size,
            chunked_prefill_size=512,
            max_running=8,
            hold_timeout=layout.hold_timeout,
            dtype="bfloat16",
            transfer=transfer,
            allow_unproven=True,  # what an engine can prove is for the scene to show
            **scene.settings(safe),
        )
        self._donor, self._decode = scene.faults(folder, safe)

    @property
    def prefills(self) -> list[str]:
        return [f"prefill-{number}" for number in range(self.layout.prefills)]

    def __enter__(self) -> Stage:
        try:
            self._start()
        except BaseException:
            self.cluster.close()
            raise
        return self

    def _start(self) -> None:
        """In push decode's pages are watched and the donor's writes held; in pull prefill's, and decode's reads."""
        gated, watched = {"gate": str(self.gate), "journal": str(self.posts)}, {"journal": str(self.ledger)}
        pull = self.cluster.common.get("direction") == "pull"
        replace, unchecked = msgspec.structs.replace, not self.safe
        donor = replace(self._donor, unchecked=unchecked, **(watched if pull else gated))
        pause = {"pause": str(self.pause), "pause_after": COUNTED + 2}
        self._decode = replace(self._decode, unchecked=unchecked, **pause, **(gated if pull else watched))
        for number, name in enumerate(self.prefills):
            faults = donor if number == 0 else Faults()
            self.cluster.spawn("prefill", name, faults, max_total_tokens=self.layout.prefill_pool)
        self.cluster.spawn("decode", DECODE, self._decode, max_total_tokens=self.layout.pool)
        self.cluster.wait_for(*self.prefills, DECODE, seconds=START)

    def __exit__(self, *_: object) -> None:
        self.cluster.close()

    # ------------------------------------------------------------ asking

    def chat(self, message: str) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def words(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def ask(self, prompt: Sequence[int], prefill: str, tokens: int, room: int | None = None) -> LabRequest:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        return self.cluster.start(prompt, sampling, (prefill, DECODE), deadline=300.0, room=room)

    def ask_as_victim(self, prompt: Sequence[int], tokens: int) -> LabRequest:
        """Who gets, or waits for, the donor's pages; marked in the picture."""
        Journal(self.ledger).note("asked", None, ())
        return self.ask(prompt, self.prefills[-1], tokens)

    def baseline(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The answer on this cluster while nobody else is there."""
        request = self.ask(prompt, self.prefills[-1], tokens)
        self.until(lambda: request.over, "the baseline")
        if request.outcome != "length":
            raise RuntimeError(f"the baseline was not answered: {request.ends}")
        return list(request.tokens)

    def cut_decode_leg(self, request: LabRequest) -> None:
        """The one-sided abort: prefill hears of it from decode alone, if at all."""
        request.cancelled = True
        self.cluster._send(DECODE, Cancel(request.rid, "client gone"))

    # ------------------------------------------------------------ restarting

    def prepare_restart(self) -> None:
        """Another decode process loads the model meanwhile."""
        self._spare = self.cluster.launch(
            "decode", DECODE, self._decode, held=True, max_total_tokens=self.layout.pool
        )

    def restart_decode(self, donor: LabRequest) -> None:
        """Decode is killed and its successor serves; the router ends what it was doing, as the product's does."""
        assert self._spare is not None
        self.cluster.kill(DECODE)
        donor.lost[DECODE] = "killed"
        donor.cancelled = True
        self.cluster._send(donor.workers[0], Cancel(donor.rid, "decode is gone"))
        journal = Journal(self.ledger)
        for note in [note for note in self.notes(0.0) if note.event == "owned"][-1:]:
            journal.note("returned", note.tid, note.pages, detail="its process is dead")
        self.cluster.install("decode", DECODE, self._spare)
        self.cluster.wait_for(DECODE, seconds=PATIENCE)

    # ------------------------------------------------------------ watching

    def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        self.cluster.until(lambda: bool(condition()), seconds, what)

    def notes(self, since: float) -> list[Note]:
        return self._reader.since(since)

    def pages_of(self, event: str, since: float) -> tuple[int, ...]:
        """Decode's pages in the latest such note."""
        return next((note.pages for note in reversed(self.notes(since)) if note.event == event), ())

    def until_posted(self, request: LabRequest, since: float, what: str) -> None:
        """Raises RuntimeError when the request ends before."""
        self.until(lambda: self.pages_of("posted", since) or request.over, f"{what} to be posted")
        if not self.pages_of("posted", since):
            said = "; ".join(f"{name}: {ends[0].reason}" for name, ends in request.ends.items())
            raise RuntimeError(f"{what} was never posted, its request has ended: {said}")

    def until_returned(self, pages: Sequence[int], since: float, what: str) -> None:
        """All of them by one note: those of an earlier request may still be on their way back."""
        asked = set(pages)

        def back() -> bool:
            return any(note.event == "returned" and asked <= set(note.pages) for note in self.notes(since))

        self.until(back, f"{what} to be back")

    def landed(self, since: float) -> bool:
        """A write that was posted or let go since then is over."""
        return any(note.event in ("landed", "refused") for note in self.notes(since))

    def waiting(self) -> bool:
        return not self._looked_lately() and bool(self._inspect()["waiting"])

    def idle(self) -> bool:
        return not self._looked_lately() and not self._inspect()["not_idle"]

    def _looked_lately(self) -> bool:
        """Asking costs decode some milliseconds; it is not asked all the time."""
        return time.monotonic() - self._looked < LOOK

    def late_bytes(self) -> int:
        """That decode's transport has thrown away so far; engines that do not see them count none."""
        engines = self._inspect()["transport"]["engines"]
        return sum(engine["counters"].get("late_bytes", 0) for engine in engines)

    def _inspect(self) -> dict[str, Any]:
        self._looked = time.monotonic()
        return self.cluster.inspect(DECODE, seconds=PATIENCE)

    def settle(self) -> None:
        """Every page back before the next run."""
        self.until(self.idle, "decode to have all its pages back")


def parting(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which two answers differ; None when one is as far as the other and equal."""
    for position, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return position
    return None if len(expected) == len(found) else min(len(expected), len(found))
