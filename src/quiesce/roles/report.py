"""What a worker reports of itself: metric samples under the field's names, for the router's /metrics.

docs/metrics.md says what each means. Every label a metric can have is there from the start, at 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quiesce.core.admission import pages_for
from quiesce.core.lender import State as Lending
from quiesce.core.messages import Ended, Sample
from quiesce.roles.generation import Generation
from quiesce.roles.legs import WorkerLeg
from quiesce.roles.proving import unproven

if TYPE_CHECKING:
    from quiesce.roles.decode import DecodeWorker
    from quiesce.roles.prefill import PrefillWorker
    from quiesce.roles.worker import Worker
    from quiesce.transfer.interface import Transport

log = logging.getLogger("quiesce.requests")

PROOFS = ("completed", "drained", "never_started", "fenced", "gone", "unsound")
ENDS = ("stop", "length", "handed_over", "cancelled", "refused", "failed")
TRANSFER_ENDS = ("done", "failed", "drained", "never_started")
PAGES = ("free", "owned", "cached", "held", "retained")
UNDER_WAY = (Lending.RESERVED, Lending.OFFERED, Lending.LANDED)


def gauge(name: str, text: str, value: float, **labels: str) -> Sample:
    return Sample(f"quiesce:{name}", "gauge", text, tuple(labels.items()), float(value))


def counter(name: str, text: str, value: float, **labels: str) -> Sample:
    return Sample(f"quiesce:{name}", "counter", text, tuple(labels.items()), float(value))


def about(leg: WorkerLeg) -> dict[str, str]:
    """Fields of a log line about a request. The peer is the other half's process."""
    fields = {"rid": leg.rid, "room": str(leg.start.room)}  # as text: 63 bits are too many for a JSON number
    if leg.tid is not None:
        fields["transfer"] = str(leg.tid)
    if leg.peer_epoch is not None:
        fields["peer_epoch"] = f"{leg.peer_epoch:016x}"
    return fields


def timing(leg: WorkerLeg, now: float) -> dict[str, Any]:
    """Milliseconds of a leg that ends now; what it did not get to is left out."""
    spans = {
        "queue_ms": (leg.arrived, leg.left_queue),
        "transfer_ms": (leg.transfer_began, leg.transfer_ended),
        "total_ms": (leg.arrived, now),
    }
    return {
        name: round((end - begin) * 1000, 1)
        for name, (begin, end) in spans.items()
        if begin is not None and end is not None
    }


def record(worker: Worker, leg: WorkerLeg, ended: Ended) -> None:
    """The measures of a leg that was let in and has ended, and its one line in the log."""
    if leg.start.probe:
        log.debug("a probe ended %s%s", ended.outcome, f" ({ended.reason})" if ended.reason else "")
        return
    if leg.left_queue is not None:
        worker.waits.queue.observe(leg.left_queue - leg.arrived)
    if leg.transfer_began is not None and leg.transfer_ended is not None:
        pages = pages_for(len(leg.start.token_ids), worker.settings.page_size)
        size = pages * worker.engine.fingerprint.page_bytes
        worker.transfers.observe(leg.transfer_ended - leg.transfer_began, size)
    spans = timing(leg, time.monotonic())
    spent = ", ".join(f"{name.removesuffix('_ms')} {ms:.0f} ms" for name, ms in spans.items())
    why = f" ({ended.reason})" if ended.reason else ""
    tokens = {"prompt_tokens": ended.prompt_tokens, "completion_tokens": ended.completion_tokens}
    said = {**about(leg), "outcome": ended.outcome, "status": ended.status, **tokens, **spans}
    level = logging.WARNING if ended.outcome == "failed" else logging.INFO
    log.log(level, "ended %s%s: %d + %d tokens, %s", ended.outcome, why, *tokens.values(), spent, extra=said)


def worker_samples(worker: Worker) -> list[Sample]:
    """Of every role."""
    ledger, legs, batch, arrivals = worker.ledger, worker.legs, worker.batch, worker.listener.counts.arrivals
    census = ledger.census()
    return [
        *(gauge("kv_pages", "KV pages by state", getattr(census, state), state=state) for state in PAGES),
        gauge(
            "kv_held_bytes",
            "KV bytes of ended requests that wait for proof, retained ones included",
            (census.held + census.retained) * worker.engine.fingerprint.page_bytes,
        ),
        *(
            counter("lease_closed_total", "Leases closed, by proof", ledger.closed_by[proof], outcome=proof)
            for proof in PROOFS
        ),
        *(
            counter("hold_budget_refusals_total", "Requests refused: too much waits for proof", count, budget=budget)
            for budget, count in worker.budget.refused.items()
        ),
        counter("lease_opened_total", "Leases opened, those of engine steps included", ledger.opened),
        counter("lease_stale_total", "Proofs that fitted no open lease", ledger.stale),
        counter(
            "prompt_tokens_computed_total", "Prompt tokens this engine computed", worker.steps.prompt_tokens_computed
        ),
        counter("tokens_sent_total", "Answer tokens sent to the router", legs.sent),
        counter("requests_started_total", "Legs that arrived at this worker", legs.started),
        *(
            counter(
                "requests_ended_total", "Legs that ended, by outcome", legs.ended.get(outcome, 0), outcome=outcome
            )
            for outcome in ENDS
        ),
        gauge("num_running_reqs", "Requests in the running batch", len(batch)),
        gauge("num_queue_reqs", "Requests at this worker that are not in the batch", len(legs) - len(batch)),
        counter("engine_steps_total", "Steps the engine has made", worker.thread.steps),
        counter("faults_total", "Unexpected errors that were logged and survived", worker.fault_count),
        counter("connections_total", "Connections to the control socket, of whoever it may be", arrivals.accepted),
        *(
            counter("handshakes_failed_total", "Of those: that never became a peer's", count, kind=kind)
            for kind, count in arrivals.failed().items()
        ),
        counter("messages_malformed_total", "Frames from peers and router that were no message", worker.malformed),
        counter(
            "messages_misplaced_total",
            "Messages that were not the sender's to say, or not for this role",
            worker.listener.counts.misplaced,
        ),
        gauge(
            "transport_unproven",
            "1: the transport cannot prove that what was posted has ended",
            worker.caps is not None and unproven(worker.caps),
        ),
        *worker.waits.samples(),
    ]


def engine_samples(transport: Transport) -> list[Sample]:
    """What the transfer engines count, each under its own name."""
    about = "What a transfer engine did, by its own name for it"
    return [
        counter("transfer_engine_events_total", about, value, event=name)
        for name, value in sorted(transport.counters().items())
    ]


def lender_samples(worker: DecodeWorker) -> list[Sample]:
    lender, holds, reads = worker.lender, worker.holds, worker.reads()
    return [
        *(
            counter(
                "decode_deferred_kv_release_total",
                "Holds that ended, by the proof that ended them",
                holds.outcomes[proof],
                outcome=proof,
            )
            for proof in PROOFS
        ),
        gauge("num_decode_deferred_kv_release_reqs", "Ended requests whose pages wait for proof", len(holds)),
        gauge(
            "decode_deferred_kv_release_oldest_post_seconds",
            "Age of the oldest write that prefill has not finished for a hold, as it says",
            holds.oldest_post(),
        ),
        gauge("decode_deferred_kv_release_oldest_seconds", "Age of the oldest hold; 0 without one", holds.oldest()),
        gauge(
            "num_decode_prealloc_queue_reqs",
            "Requests that wait for pages or for their prefill worker",
            len(worker.waiting),
        ),
        gauge(
            "num_decode_transfer_queue_reqs",
            "Requests whose pages are lent to prefill",
            sum(transfer.state in UNDER_WAY for transfer in lender.transfers.values()),
        ),
        counter("prompt_tokens_received_total", "Prompt tokens whose KV came from prefill", worker.received),
        counter("num_transfer_failed_reqs_total", "Requests that failed in their hand-off", worker.transfers_failed),
        counter("num_bootstrap_failed_reqs_total", "Requests that never found their other half", worker.unpaired),
        counter("stale_messages_dropped_total", "Hand-off messages about nothing that is open", lender.stale),
        *engine_samples(worker.transport),
        counter("transfer_taints_total", "Posts that ended UNKNOWN", reads["taints"]),
        *(
            counter("grant_checks_total", "Pulls looked up at their source after landing", reads[said], outcome=said)
            for said in ("in_force", "ended")
        ),
        *holds.samples(),
        *worker.transfers.samples(),
    ]


@dataclass(frozen=True)
class Standing:
    """What a prefill worker's machine has to say of itself."""

    known: int  # transfers that decode has not closed yet
    ended: Mapping[str, int]  # by what became of them here
    taints: int
    stale: int


def prefill_samples(worker: PrefillWorker) -> list[Sample]:
    standing, jobs = worker.standing(), worker.by_leg.values()
    alone = sum(room not in worker.jobs for room in worker.legs.by_room)
    return [
        gauge(
            "num_prefill_bootstrap_queue_reqs",
            "Requests without an offer, and offers without a request",
            alone + sum(job.request is None for job in jobs),
        ),
        gauge(
            "num_prefill_inflight_queue_reqs",
            "Requests that are computed and whose last pages are on their way",
            sum(job.sequence is not None and job.sequence.computed >= len(job.sequence.tokens) for job in jobs),
        ),
        gauge("num_prefill_transfer_records", "Transfers that decode has not closed yet", standing.known),
        *(
            counter(
                "prefill_transfers_total",
                "Transfers by what became of them here",
                standing.ended.get(end, 0),
                outcome=end,
            )
            for end in TRANSFER_ENDS
        ),
        counter("transfer_taints_total", "Posts that ended UNKNOWN", standing.taints),
        counter("num_transfer_failed_reqs_total", "Requests that failed in their hand-off", worker.transfers_failed),
        counter("num_bootstrap_failed_reqs_total", "Requests that never found their other half", worker.unpaired),
        counter("stale_messages_dropped_total", "Hand-off messages about nothing that is open", standing.stale),
        *engine_samples(worker.transport),
        *worker.transfers.samples(),
    ]


def generation_samples(generation: Generation) -> list[Sample]:
    return [
        gauge("num_retracted_reqs", "Requests retracted and waiting to resume", len(generation.retracted)),
        counter(
            "num_retractions_total", "Times a request gave its pages back under pressure", generation.retractions
        ),
    ]
