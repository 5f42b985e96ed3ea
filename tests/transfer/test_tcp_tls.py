"""tcp under TLS: the same transport, and nobody without a certificate of the authority."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quiesce.core.posting import Outcome
from quiesce.transfer.tcp import TcpTransport
from quiesce.transfer.tcp_stream import Stream
from quiesce.transfer.tcp_tls import Tls
from quiesce.transfer.tcp_wire import Closed

from .test_tcp import P, Pair


def _certificate(folder: Path, name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None):  # type: ignore[no-untyped-def]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / f"{name}.key").write_bytes(pem)
    (folder / f"{name}.key").chmod(0o600)
    return made, key


def tls_of(folder: Path, authority: str, name: str) -> Tls:
    _certificate(folder, name, _certificate(folder, authority, None))
    return Tls(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{authority}.pem")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return tls_of(tmp_path_factory.mktemp("tls"), "authority", "worker")


@pytest.fixture
def pair(tls: Tls) -> Iterator[Pair]:
    pair = Pair(lanes=2, max_transfer_pages=8, tls=tls)
    yield pair
    pair.close()


def test_pages_go_both_ways_under_tls(pair: Pair) -> None:
    peer = pair.attach()
    grant = pair.lend()
    pages = list(grant.pages)
    assert pair.outcome(pair.poster.transport.write(peer, pages, pages, grant)) is Outcome.PLACED
    assert (pair.lender.arena.pages == 7).all()
    pair.lender.arena.pages[:] = 8
    readable = pair.lend(access="read")
    assert pair.outcome(pair.poster.transport.read(peer, pages, pages, readable)) is Outcome.PLACED
    assert (pair.poster.arena.pages == 8).all()
    proof = pair.lender.transport.fence(P, readable.generation, frozenset(pages))
    assert proof is not None
    assert pair.outcome(pair.poster.transport.write(peer, pages, pages, grant)) is Outcome.FAILED_CLEAN
    assert pair.poster.transport.self_test() == []


def test_without_a_certificate_of_the_authority_there_is_no_connection(pair: Pair, tmp_path: Path) -> None:
    found = msgspec.msgpack.decode(pair.lender.transport.descriptor(P))
    with socket.create_connection((found["host"], found["port"])) as sock:
        sock.sendall(b"\0" * 64)
        pair.until(lambda: pair.counted("attach_refused") == 1, "plain bytes to be refused")
    stranger = pair.side(0xE, lanes=1, tls=tls_of(tmp_path, "other-authority", "stranger"))
    stranger.transport.connect(pair.lender.transport.descriptor(0xE), 0xE)
    pair.until(lambda: pair.counted("attach_refused") >= 2, "the stranger to be refused")
    assert pair.lender.transport.generation(0xE) is None


def test_with_and_without_tls_do_not_meet(pair: Pair) -> None:
    plain = pair.side(0xE)
    with pytest.raises(ValueError, match="without TLS here: give both sides --transfer-tls"):
        plain.transport.connect(pair.lender.transport.descriptor(0xE), 0xE)
    with pytest.raises(ValueError, match="with TLS here"):
        pair.poster.transport.connect(plain.transport.descriptor(P), P)


def test_files_that_do_not_do_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.pem"):
        TcpTransport(1, tls=Tls(tmp_path / "nowhere.pem", tmp_path / "k", tmp_path / "a"))


def test_old_versions_of_tls_are_not_spoken(tls: Tls) -> None:
    assert all(context.minimum_version is ssl.TLSVersion.TLSv1_3 for context in tls.contexts())


def test_a_connection_that_is_ended_yields_no_raw_bytes_of_the_wire(tls: Tls) -> None:
    """A receive that is under way when another thread ends the connection: what it stores is what was sent."""
    server, client = tls.contexts()
    ours, theirs = socket.socketpair()
    wrapped: list[ssl.SSLSocket] = []
    handshake = threading.Thread(target=lambda: wrapped.append(server.wrap_socket(theirs, server_side=True)))
    handshake.start()
    stream = Stream(client.wrap_socket(ours))
    handshake.join(10)
    wrapped[0].sendall(b"\x07" * 4096)
    stream.end()
    received, buffer = b"", bytearray(8192)
    with pytest.raises(Closed):
        while True:
            got = stream.receive_some(memoryview(buffer))
            received += buffer[: got or 0]
    assert set(received) <= {7}
    for sock in (stream.sock, wrapped[0]):
        sock.close()
