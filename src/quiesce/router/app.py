"""The router process: HTTP in front, workers behind, one event loop. Composition only."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Generator
from typing import TYPE_CHECKING

import uvicorn
import uvloop
import zmq
from starlette.applications import Starlette

from quiesce.api.access import Access
from quiesce.api.chat import TextModel
from quiesce.api.generate import Front, FrontLimits
from quiesce.api.metrics import FrontMetrics
from quiesce.api.server import make_app
from quiesce.api.worker_app import make_worker_app
from quiesce.channel import KeyRing
from quiesce.ops.logs import configure_logging
from quiesce.router import admin
from quiesce.router.attempts import Rules
from quiesce.router.breaker import BreakerRules
from quiesce.router.dispatch import Dispatcher
from quiesce.router.http import Gate
from quiesce.router.links import Links
from quiesce.router.registry import Patience, Registry
from quiesce.router.tls_door import TlsDoor
from quiesce.router.worker_ports import Ports, WorkerPort

if TYPE_CHECKING:
    from quiesce.roles.settings import RouterSettings

log = logging.getLogger(__name__)

SPARE_CONNECTIONS = 1024  # beyond twice the requests: between two requests, or with none yet
DESCRIPTORS = 65_536
EXIT_SETTINGS = 2  # something in the settings cannot be used: address, keys, model folder


class _Server(uvicorn.Server):
    """Signals are the router's: it drains before the HTTP server may end."""

    def __init__(self, config: uvicorn.Config, gate: Gate, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._gate, self._tls = gate, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        self.servers = [TlsDoor(bound, self._gate, self._tls, self._http) for bound in sockets or []]  # type: ignore[misc]
        self.started = True

    def _http(self) -> asyncio.Protocol:
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        return self.config.http_protocol_class(config=self.config, **state)  # type: ignore[call-arg]

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Router:
    """Listens from `start` to `stop`. Make it inside the running loop.

    Raises OSError, ValueError or zmq.ZMQError when an address or the keys cannot be used.
    """

    def __init__(self, settings: RouterSettings, text: TextModel, patience: Patience | None = None) -> None:
        self._settings = settings
        self._stopping: asyncio.Task[None] | None = None
        self._tls = None if settings.tls is None else settings.tls.server()
        if settings.tls is not None:
            settings.tls.try_out()
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._socket = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
        self.host, self.port = self._socket.getsockname()[:2]
        rules = _rules(settings, text)
        patience = patience or Patience.for_hold_timeout(settings.hold_timeout)
        self.dispatcher = Dispatcher(Registry(patience, rules.breaker), rules)
        try:
            self.links = Links(settings.registry, settings.keys, self.dispatcher)
        except BaseException:
            self._socket.close()
            raise
        self.dispatcher.start(self.links)
        limits = FrontLimits(settings.max_inflight, settings.request_timeout, settings.max_body)
        access = Access(settings.api_keys)
        self.front = Front(self.dispatcher, text, settings.served_model_name, limits, FrontMetrics(), access)
        self._gate = Gate(2 * settings.max_inflight + SPARE_CONNECTIONS)
        self.dispatcher.counted_elsewhere.append(self._gate.counters)
        self._server = _server(make_app(self.front), self._gate, self._tls)
        self._other_servers = [*self._single_workers(), *self._admin()]

    def _admin(self) -> list[tuple[_Server, socket.socket]]:
        settings = self._settings
        if not settings.admin:
            return []
        key = settings.admin_key.read_text("utf-8").strip() if settings.admin_key else ""
        bound = admin.bind(settings.admin, key, beyond=settings.tls_client_ca is not None)
        log.info("operators are heard at %s", settings.admin)
        side = admin.Admin(self.dispatcher, KeyRing(settings.keys / "ring"), key)
        tls = None if settings.admin.startswith(admin.UNIX) else self._tls
        return [(_server(side.app(), self._gate, tls), bound)]

    def _single_workers(self) -> list[tuple[_Server, socket.socket]]:
        """A server for each port that stands for one worker."""
        front, settings = self.front, self._settings
        ports = Ports(dict(settings.worker_ports), frozenset({settings.host, *settings.worker_hosts}))
        servers = []
        for name, number in settings.worker_ports:
            port = WorkerPort(self.dispatcher, name, ports)
            own = Front(port, front.text, front.model, front.limits, front.metrics, front.access)
            bound = socket.create_server((settings.host, number), family=self._socket.family, backlog=2048)
            servers.append((_server(make_worker_app(own, port), self._gate, self._tls), bound))
        return servers

    async def serve(self) -> None:
        """Returns after `stop`."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "http" if self._tls is None else "https"
        log.info("listening on %s://%s:%d, workers register at %s", scheme, shown, self.port, self.links.endpoint)
        try:
            others = [server.serve(sockets=[bound]) for server, bound in self._other_servers]
            await asyncio.gather(self._main(), *others)
        finally:
            self.dispatcher.close()

    async def _main(self) -> None:
        await self._server.serve(sockets=[self._socket])
        for server, _ in self._other_servers:
            server.should_exit = True

    def stop(self) -> None:
        """Drains, then ends `serve`. Called again: running requests are cancelled, and their clients told."""
        if self._stopping is None:
            log.info("draining: %d requests run", self.front.inflight)
            self._stopping = asyncio.get_running_loop().create_task(self._drain(), name="drain")
        else:
            self.dispatcher.hurry()

    async def _drain(self) -> None:
        try:
            await self.dispatcher.drain(self._settings.drain_timeout)
        finally:
            self._server.should_exit = True


def _server(app: Starlette, gate: Gate, tls: ssl.SSLContext | None) -> _Server:
    config = uvicorn.Config(
        app,
        http=gate.protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody asks where a client is, and it would be looked for in every request
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )
    return _Server(config, gate, tls)


def _rules(settings: RouterSettings, text: TextModel) -> Rules:
    return Rules(
        policy=settings.policy,
        retries=settings.retries,
        failover=settings.failover,
        local_prefill_below=settings.local_prefill_below,
        breaker=BreakerRules(settings.breaker_failures, settings.breaker_seconds),
        eos=frozenset(text.eos_ids),
        deadline=settings.request_timeout,
    )


def run(settings: RouterSettings) -> int:
    """Runs the router until SIGTERM or SIGINT; returns the exit status of the process."""
    configure_logging(settings.log_level, settings.log_format, "router")
    _raise_descriptor_limit()
    try:
        text = TextModel(settings.model, settings.tool_call_parser)
        uvloop.run(_run(settings, text))
    except (OSError, ValueError, zmq.ZMQError) as error:
        log.error("the router cannot start: %s", error)
        return EXIT_SETTINGS
    text.close()
    return 0


def _raise_descriptor_limit() -> None:
    """Every client takes a descriptor, and shells commonly allow a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(settings: RouterSettings, text: TextModel) -> None:
    router = Router(settings, text)
    gc.freeze()  # what start-up has made stays: to look through it all for garbage would stop streams for 0.06 s
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, router.stop)
    await router.serve()
