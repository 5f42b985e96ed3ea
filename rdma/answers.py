"""Hand-offs with a model over the engine that is on trial: workers as the product starts them, in processes of their
own, the tests' tiny model, and answers that are compared with those of one process alone.

The lanes claim nothing that proves, so the workers have `--allow-unproven`: what is lost must end retained, and no
page of it may be seen again.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quiesce.core.messages import Sampling
from quiesce.lab import storms
from quiesce.lab.cells import Direction
from quiesce.lab.cluster import LabRequest, Oracle
from quiesce.lab.patient import PatientRouter
from quiesce.lab.rounds import oracle_of
from quiesce.lab.storm import Plan
from quiesce.lab.storms import DECODE, PREFILLS, SIZES, WORDS, Found, events, storm
from quiesce.lab.worker import Faults
from quiesce.transfer.conformance.bench import Bench, Nonconforming, require
from tiny_model import make_tiny_llama

HOLD = 60.0  # seconds of --hold-timeout: an emulated machine may be silent for long
DEADLINE = 900.0  # seconds that a request may take
PATIENCE = 240.0  # seconds for an attachment, and for one thing to happen
POOL = 512  # tokens
PACE = (20.0, 200.0)  # ms a page of the donor that is slow, so that a request can be cut in the middle
MIDDLE = 1500.0  # ms a page of the one that is killed in the middle
PLAN = Plan(requests=24, in_flight=3)
PROMPT, LONG, SHORT = 120, 60, 12  # tokens

Check = Callable[[Bench], None]


class Emulated(PatientRouter):
    """The lab's router with the patience that an emulated machine needs."""

    def start(self, *arguments: Any, **more: Any) -> LabRequest:
        return super().start(*arguments, **{"deadline": DEADLINE, **more})

    def inspect(self, name: str, seconds: float = PATIENCE, page: int | None = None) -> dict[str, Any]:
        return super().inspect(name, seconds, page)

    def unproven(self, name: str) -> bool:
        found = [s.value for s in self.inspect(name)["samples"] if s.name == "quiesce:transport_unproven"]
        return found == [1]

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def all_of(label: str, address: str) -> list[Check]:
    """`address`: own one, by which the engine reaches the other worker."""
    checks: list[Check] = []
    for direction in ("push", "pull"):
        for check in (_answers_the_same, _prefill_dies):
            checks.append(partial(check, label, address, direction))
            checks[-1].__name__ = f"a_model{check.__name__}_{direction}"
    return checks


def _answers_the_same(label: str, address: str, direction: Direction, bench: Bench) -> None:
    """About half of the requests are cut, anywhere. Who is not is answered right, and all pages come back."""
    storms.IDLE = HOLD + PATIENCE
    with _workers(label, address, direction, PACE) as (cluster, oracle):
        found = storm(cluster, oracle, PLAN, may_fail=False, seconds=DEADLINE)
        print(f"  {label}, {direction}: {found.line()}", flush=True)
        _went_by(cluster, label, direction, found)
        require(not found.wrong, "; ".join(found.wrong))
        require(set(found.closed["decode"]) | set(found.closed["prefill"]) <= WORDS, f"closed by {found.closed}")


def _went_by(cluster: Emulated, label: str, direction: Direction, found: Found) -> None:
    """The pages went by this engine, and by no other."""
    posters = PREFILLS if direction == "push" else (DECODE,)
    placed = sum(events(cluster.inspect(name), "placed_pages") for name in posters)
    require(placed > found.report.survivors, f"{placed} pages were placed for {found.report.survivors} answers")
    for name in cluster.workers:
        peers = cluster.inspect(name)["transport"]["peers"]
        require(all(how.startswith(f"{label}:") for how in peers.values()), f"{name} has {peers}")


def _prefill_dies(label: str, address: str, direction: Direction, bench: Bench) -> None:
    """Killed in the middle of a transfer. Its request fails, with a reason; the one beside it is answered right; what
    was lent to it stays retained while others are answered."""
    victim, other = PREFILLS
    poster = victim if direction == "push" else DECODE
    with _workers(label, address, direction, (MIDDLE, MIDDLE)) as (cluster, oracle):
        draw = random.Random(1)
        prompts = [[draw.randrange(8, 500) for _ in range(PROMPT)] for _ in range(3)]
        expected = oracle(prompts, LONG)

        def ask(number: int, prefill: str, tokens: int) -> LabRequest:
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            return cluster.start(prompts[number], sampling, (prefill, DECODE))

        for prefill in PREFILLS:
            cluster.until_served(partial(ask, 0, prefill, SHORT), DEADLINE)
        bystander = ask(1, other, LONG)
        cluster.until(lambda: bool(bystander.tokens), DEADLINE, "the bystander's first token")
        before = events(cluster.inspect(poster), "placed_pages")
        subject = ask(2, victim, SHORT)
        cluster.until(lambda: events(cluster.inspect(poster), "placed_pages") > before, DEADLINE, "a page to arrive")
        require(not subject.tokens, "the transfer was over before its prefill worker could be killed")
        cluster.kill(victim)
        cluster.until(lambda: subject.told and bystander.over, DEADLINE, "word of the death")
        require(bystander.tokens == expected[1], "the answer beside it is wrong")
        require(_reasons(subject) and not subject.tokens, f"whose prefill worker died was told {subject.ends}")
        kept = _kept(cluster)
        if direction == "push" and cluster.unproven(DECODE):
            pages = -(-PROMPT // SIZES["page_size"])
            require(kept == pages, f"{kept} of the {pages} pages that were lent to it are retained")
        again = [ask(number, other, SHORT) for number in range(3)]
        cluster.until(lambda: all(request.over for request in again), DEADLINE, "the next answers")
        for number, request in enumerate(again):
            require(request.tokens == expected[number][:SHORT], f"the next answer is wrong: {request.ends}")
        later = _kept(cluster)  # a read that has ended since is its own proof
        require(later == kept if direction == "push" else later <= kept, f"first {kept} were retained, then {later}")
        print(f"  {label}, {direction}: {kept} pages of the dead worker's transfer are retained", flush=True)


def _reasons(request: LabRequest) -> list[str]:
    """Why it failed, as its client was told."""
    return [*request.errors, *(ended.reason for ended in request.ends.get(DECODE, []) if ended.outcome != "length")]


def _kept(cluster: Emulated) -> int:
    """Pages that decode retains, once it owns and holds nothing else."""
    state: dict[str, Any] = {}

    def settled() -> bool:
        state.update(cluster.inspect(DECODE))
        return not (state["legs"] or state["pages"]["owned"] or state["pages"]["held"])

    cluster.until(settled, HOLD + PATIENCE, "decode to have settled")
    require(not state["unsound"], f"{state['unsound']} leases were closed without proof")
    return int(state["pages"]["retained"])


@contextlib.contextmanager
def _workers(
    label: str, address: str, direction: Direction, pace: tuple[float, float]
) -> Iterator[tuple[Emulated, Oracle]]:
    """Two prefill workers and a decode worker. In push the first one's pages go at this pace, in pull decode's reads.
    Raises Nonconforming for what goes wrong, with the end of the workers' log."""
    with tempfile.TemporaryDirectory(prefix="qs-", ignore_cleanup_errors=True) as name:
        model = make_tiny_llama(Path(name) / "tiny", layers=4)
        settings = {
            **SIZES,
            "context_length": 256,
            "transfer": label,
            "transfer_bind": address,
            "allow_open_transfer": True,
            "direction": direction,
            "allow_unproven": True,
            "max_retained": 1.0,  # nobody would start it again
        }
        cluster = Emulated(model, Path(name), hold_timeout=HOLD, **settings)
        cluster.patience = PATIENCE
        slow = Faults(seed=1, ms_per_page=pace)
        try:
            with cluster:
                for prefill in PREFILLS:
                    faults = slow if direction == "push" and prefill == PREFILLS[0] else Faults()
                    cluster.spawn("prefill", prefill, faults, max_total_tokens=2 * POOL)
                cluster.spawn("decode", DECODE, slow if direction == "pull" else Faults(), max_total_tokens=POOL)
                oracle = oracle_of(model)
                cluster.wait_for(*PREFILLS, DECODE, seconds=DEADLINE)
                yield cluster, oracle
        except (AssertionError, TimeoutError, RuntimeError) as error:
            raise Nonconforming(f"{error}; the workers said: {cluster.log()[-1500:] or 'nothing'}") from error
