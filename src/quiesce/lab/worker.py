"""Runs one worker with faults of the lab: `python -m quiesce.lab.worker SPEC.json`. The product never gets here."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from quiesce.lab.faulty import FaultyTransport, seeded
from quiesce.lab.unsafe import free_at_once
from quiesce.roles.assembly import make_engine, make_transport
from quiesce.roles.colocated import ColocatedWorker
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.settings import WorkerSettings
from quiesce.transfer.interface import Transport


class Faults(msgspec.Struct, frozen=True):
    """What the writes of a prefill worker meet, and which release rule a decode worker has."""

    seed: int = 0
    hold: float = 0.0
    unknown: float = 0.0
    fail: float = 0.0
    ms_per_page: tuple[float, float] = (0.0, 0.0)
    release: Literal["proof", "at once"] = "proof"


class Spec(msgspec.Struct, frozen=True):
    settings: dict[str, Any]
    faults: Faults = Faults()


def settings_from(plain: dict[str, Any]) -> WorkerSettings:
    paths = {key: Path(plain[key]) for key in ("model", "keys", "run_dir")}
    return WorkerSettings(**{**plain, **paths})


def transport_for(settings: WorkerSettings, faults: Faults) -> Transport:
    transport = make_transport(settings)
    if settings.role != "prefill":
        return transport
    decide = seeded(
        faults.seed,
        hold=faults.hold,
        unknown=faults.unknown,
        fail=faults.fail,
        ms_per_page=faults.ms_per_page,
    )
    return FaultyTransport(transport, decide)


def main(path: str) -> int:
    spec = msgspec.json.decode(Path(path).read_bytes(), type=Spec)
    settings = settings_from(spec.settings)
    logging.basicConfig(
        level=settings.log_level.upper(), format=f"%(asctime)s {settings.name} %(levelname)s %(message)s"
    )
    engine = make_engine(settings)
    if settings.role == "colocated":
        return ColocatedWorker(settings, engine).run()
    transport = transport_for(settings, spec.faults)
    if settings.role == "prefill":
        return PrefillWorker(settings, engine, transport).run()
    worker = DecodeWorker(settings, engine, transport)
    if spec.faults.release == "at once":
        free_at_once(worker.ledger)
    return worker.run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
