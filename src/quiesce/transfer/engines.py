"""How each engine that is built in is made. Libraries load inside them: a missing one hurts nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiesce.transfer.agent import Engine
from quiesce.transfer.interface import Transport
from quiesce.transfer.registry import rdma_devices

if TYPE_CHECKING:
    from quiesce.transfer.registry import Setup


def _no_lane(name: str, setup: Setup) -> None:
    if setup.lane:
        raise ValueError(f"{name} has no lanes: leave out /{setup.lane}")


def shm(setup: Setup) -> Transport:
    from quiesce.transfer.shm import ShmTransport  # noqa: PLC0415

    _no_lane("shm", setup)
    return ShmTransport(
        setup.run_dir,
        setup.epoch,
        max_transfer_pages=setup.max_transfer_pages,
        stall_seconds=setup.patience,
        direction=setup.direction,
    )


def tcp(setup: Setup) -> Transport:
    from quiesce.transfer.tcp import TcpTransport  # noqa: PLC0415

    _no_lane("tcp", setup)
    return TcpTransport(setup.epoch, host=setup.address, max_transfer_pages=setup.max_transfer_pages, tls=setup.tls)


def nixl(setup: Setup) -> Transport:
    """Lanes: rc where there is an RDMA device, else tcp; cma within one host."""
    from quiesce.transfer.nixl import NixlEngine  # noqa: PLC0415

    lane = setup.lane or ("rc" if rdma_devices() else "tcp")
    devices = "lo" if setup.host is None and lane != "rc" else ""
    return _agents(NixlEngine(lane, devices=devices), setup)  # type: ignore[arg-type]


def mooncake(setup: Setup) -> Transport:
    """Lanes: rdma where there is such a device, else tcp."""
    from quiesce.transfer.mooncake import MooncakeEngine  # noqa: PLC0415

    lane = setup.lane or ("rdma" if rdma_devices() else "tcp")
    return _agents(MooncakeEngine(lane, host=setup.address), setup)  # type: ignore[arg-type]


def mori(setup: Setup) -> Transport:
    from quiesce.transfer.mori import MoriEngine  # noqa: PLC0415

    _no_lane("mori", setup)
    return _agents(MoriEngine(host=setup.address), setup)


def _agents(engine: Engine, setup: Setup) -> Transport:
    from quiesce.transfer.agents import AgentTransport  # noqa: PLC0415

    return AgentTransport(
        engine,
        setup.run_dir,
        setup.epoch,
        host=setup.host,
        direction=setup.direction,
        max_transfer_pages=setup.max_transfer_pages,
    )


def null(setup: Setup) -> Transport:
    from quiesce.transfer.null import NullTransport  # noqa: PLC0415

    _no_lane("null", setup)
    return NullTransport(setup.epoch)
