"""Keys of several hosts: a small certificate authority, certificates of hosts, and the control keys of processes.

A folder of an authority holds `ca.key` and `ca.pem`, `ring/NAME.pub` of every process there is, `issued/` with the
certificates it gave out, and `hosts/HOST/`, what is to be copied to each host: `tls/`, `ring/` and `NAME.key` of the
processes that run there. Nothing that exists is written over.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quiesce.channel import KeyPair, KeyRing
from quiesce.channel.private import check_private, create
from quiesce.channel.tls import AUTHORITY, HOST, HOST_KEY

CA_KEY = "ca.key"
CA_DAYS, MOST_CA_DAYS = 1825, 3650
HOST_DAYS, MOST_HOST_DAYS = 397, 825
EARLIER = datetime.timedelta(minutes=5)  # the clocks of hosts differ
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
MOST_ADDRESSES = 64

_Key = ec.EllipticCurvePrivateKey


class KeysError(ValueError):
    """What cannot be made or read, in words for people."""


def init(folder: Path, days: int = CA_DAYS) -> x509.Certificate:
    """A new authority in a folder that is new or empty. Raises KeysError, OSError."""
    _within("--days", days, MOST_CA_DAYS)
    _fresh(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = _subject(f"Quiesce authority {serial & 0xFFFFFFFF:08x}")
    builder = _builder(name, name, key.public_key(), serial, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    made = builder.sign(key, hashes.SHA256())
    create(folder / CA_KEY, _private_pem(key), 0o600)
    create(folder / AUTHORITY, _pem(made), 0o644)
    for part in ("ring", "issued", "hosts"):
        (folder / part).mkdir(mode=0o700)
    return made


def add_host(
    folder: Path,
    host: str,
    addresses: Sequence[str],
    processes: Sequence[str],
    *,
    out: Path | None = None,
    days: int = HOST_DAYS,
    renew: bool = False,
) -> Path:
    """Makes the keys of one host; the folder to copy there. `addresses`: names and numbers at which others reach it,
    besides `host`. `renew`: its processes have keys already, which new ones replace. Raises KeysError, OSError."""
    _within("--days", days, MOST_HOST_DAYS)
    _check_names(host, addresses, processes)
    ca, key = _authority(folder)
    ring = KeyRing(folder / "ring")
    known = set(ring.names().values())
    if (twice := sorted(known.intersection(processes))) and not renew:
        raise KeysError(
            f"{', '.join(twice)} has a key already: every process needs a name of its own. To replace a key say "
            "--renew, and restart the process with the new one"
        )
    out = out or folder / "hosts" / host
    _fresh(out)
    made, host_key = _certificate(ca, key, host, addresses, days)
    tls = out / "tls"
    tls.mkdir(mode=0o700)
    create(tls / HOST_KEY, _private_pem(host_key), 0o600)
    create(tls / HOST, _pem(made), 0o644)
    create(tls / AUTHORITY, _pem(ca), 0o644)
    create(folder / "issued" / f"{host}-{made.serial_number:x}.pem", _pem(made), 0o644)
    for name in processes:
        pair = KeyPair.generate()
        pair.save(out / f"{name}.key")
        ring.add(name, pair.public)
    for target in {out, *(path for path in (folder / "hosts").iterdir() if path.is_dir())}:
        spread(folder / "ring", target / "ring")
    return out


def spread(ring: Path, target: Path) -> None:
    """The same public keys there as in `ring`."""
    target.mkdir(mode=0o700, exist_ok=True)
    names = {path.name for path in ring.glob("*.pub")}
    for stale in target.glob("*.pub"):
        if stale.name not in names:
            stale.unlink()
    for name in sorted(names):
        KeyRing(target).add(name.removesuffix(".pub"), (ring / name).read_text("ascii").strip())


def certificates(folder: Path) -> list[tuple[str, x509.Certificate]]:
    """What an authority's folder, or a host's, has, with a word for each. Raises KeysError."""
    found = [("authority", path) for path in (folder / AUTHORITY, folder / "tls" / AUTHORITY) if path.is_file()]
    found += [("issued", path) for path in sorted(folder.glob("issued/*.pem"))]
    found += [("host", folder / "tls" / HOST)]
    read = []
    for word, path in found:
        if not path.is_file():
            continue
        try:
            read += [(word, each) for each in x509.load_pem_x509_certificates(path.read_bytes())]
        except ValueError as error:
            raise KeysError(f"{path} is no certificate: {error}") from error
    return read


def addresses_of(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    numbers = [str(number) for number in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *numbers]


# ---------------------------------------------------------------- the parts


def _fresh(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KeysError(
            f"{folder} is there already, and nothing is written over: take another folder, or move it away"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _within(option: str, days: int, most: int) -> None:
    if not 1 <= days <= most:
        raise KeysError(f"{option} must be between 1 and {most}, not {days}")


def _check_names(host: str, addresses: Sequence[str], processes: Sequence[str]) -> None:
    if not HOST_NAME.fullmatch(host):
        raise KeysError(f"the host's name must be letters, digits, -, _ and dots, not {host!r}")
    for address in addresses:
        if not _is_number(address) and not HOST_NAME.fullmatch(address):
            raise KeysError(f"--address must be a name or a number such as 10.0.0.5, not {address!r}")
    if len(addresses) > MOST_ADDRESSES:
        raise KeysError(f"at most {MOST_ADDRESSES} times --address")
    for name in processes:
        if not NAME.fullmatch(name):
            raise KeysError(f"--process must be 1 to 40 letters, digits, - or _, not {name!r}")
    if len(set(processes)) < len(processes):
        raise KeysError("--process: one name is given twice")


def _is_number(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _authority(folder: Path) -> tuple[x509.Certificate, _Key]:
    path = folder / CA_KEY
    if not path.is_file():
        raise KeysError(f"{folder} is no authority, it has no {CA_KEY}: make one with `quiesce keys init {folder}`")
    try:
        check_private(path)
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        ca = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    except (ValueError, TypeError) as error:
        raise KeysError(f"the authority in {folder} cannot be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise KeysError(f"{path} is not the key of {folder / AUTHORITY}")
    if ca.not_valid_after_utc <= _now():
        raise KeysError(f"the authority in {folder} ended on {ca.not_valid_after_utc:%Y-%m-%d}: make a new one")
    return ca, key


def _certificate(
    ca: x509.Certificate, ca_key: _Key, host: str, addresses: Sequence[str], days: int
) -> tuple[x509.Certificate, _Key]:
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = []
    for address in dict.fromkeys([host, *addresses]):
        if _is_number(address):
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        else:
            names.append(x509.DNSName(address))
    builder = _builder(_subject(host), ca.subject, key.public_key(), x509.random_serial_number(), days, ca)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(both), False),
        (x509.SubjectAlternativeName(names), False),
        (authority, False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(ca_key, hashes.SHA256()), key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    serial: int,
    days: int,
    ca: x509.Certificate | None = None,
) -> x509.CertificateBuilder:
    begin = _now() - EARLIER
    end = begin + datetime.timedelta(days=days)
    if ca is not None:  # nothing outlives its authority
        begin, end = max(begin, ca.not_valid_before_utc), min(end, ca.not_valid_after_utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(serial).not_valid_before(begin).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: _Key) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
