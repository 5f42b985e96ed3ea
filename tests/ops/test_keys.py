"""`quiesce keys`: keys of several hosts, for their owners alone, in force for a while, never written over."""

from __future__ import annotations

import datetime
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from doctor_findings import by_name, said

from certificates import make_hosts
from quiesce import cli
from quiesce.channel import KeyPair, KeyRing
from quiesce.channel.tls import Certificates
from quiesce.ops import authority, doctor_keys


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """`run(code, *words)`: what `quiesce keys WORDS` says."""
    monkeypatch.chdir(tmp_path)

    def command(code: int, *words: str) -> str:
        assert cli.main(["keys", *words]) == code
        told = capsys.readouterr()
        return told.out + told.err

    return command


@pytest.fixture
def made(run: Callable[..., str]) -> Path:
    run(0, "init", "ca")
    run(0, "host", "ca", "alpha", "--address=10.0.0.1", "--process=router", "--process=prefill-0")
    run(0, "host", "ca", "beta.example.org", "--address=10.0.0.2", "--address=beta", "--process=decode-0")
    return Path("ca")


def test_secrets_are_for_their_owner_and_every_host_has_the_whole_ring(made: Path) -> None:
    for path in made.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & 0o022, path
        if path.suffix == ".key":
            assert mode == 0o600, path
        if path.name in ("ca", "hosts", "alpha", "tls", "ring"):
            assert mode == 0o700, path
    alpha, beta = made / "hosts" / "alpha", made / "hosts" / "beta.example.org"
    for folder in (alpha, beta, made):
        assert set(KeyRing(folder / "ring").names().values()) == {"router", "prefill-0", "decode-0"}
    assert sorted(path.stem for path in alpha.glob("*.key")) == ["prefill-0", "router"]
    assert KeyRing(alpha / "ring").name_of(KeyPair.load(beta / "decode-0.key").public) == "decode-0"
    assert not list(alpha.rglob("ca.key"))


def test_certificates_are_bounded_of_one_authority_and_for_both_sides_of_a_connection(made: Path) -> None:
    (_, ca), *issued = authority.certificates(made)
    assert ca.not_valid_after_utc - ca.not_valid_before_utc == datetime.timedelta(days=1825)
    assert {word for word, _ in issued} == {"issued"}
    for _, certificate in issued:
        certificate.verify_directly_issued_by(ca)
        assert certificate.not_valid_after_utc - certificate.not_valid_before_utc <= datetime.timedelta(days=397)
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    named = {name for _, certificate in issued for name in authority.addresses_of(certificate)}
    assert named == {"alpha", "10.0.0.1", "beta.example.org", "beta", "10.0.0.2"}
    for name in ("alpha", "beta.example.org"):
        found = Certificates.of(made / "hosts" / name)
        assert found is not None
        found.try_out()
        assert found.server().minimum_version is ssl.TLSVersion.TLSv1_3


def test_a_host_does_not_outlive_its_authority(run: Callable[..., str]) -> None:
    run(0, "init", "short", "--days=10")
    run(0, "host", "short", "alpha")
    (_, ca), (_, host) = authority.certificates(Path("short"))
    assert host.not_valid_after_utc == ca.not_valid_after_utc


def test_nothing_is_written_over(made: Path, run: Callable[..., str]) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert "ca is there already, and nothing is written over" in run(2, "init", "ca")
    assert "is there already" in run(2, "host", "ca", "alpha", "--process=decode-9")
    assert "decode-0 has a key already" in run(2, "host", "ca", "gamma", "--process=decode-0")
    assert "is there already" in run(2, "host", "ca", "gamma", "--out=ca/hosts/alpha")
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_renewed_keys_take_the_place_of_the_old_ones_in_every_ring(made: Path, run: Callable[..., str]) -> None:
    old = KeyPair.load(made / "hosts" / "alpha" / "router.key").public
    run(0, "host", "ca", "alpha", "--address=10.0.0.1", "--process=router", "--renew", "--out=alpha-2")
    new = KeyPair.load(Path("alpha-2/router.key")).public
    for folder in (made, made / "hosts" / "beta.example.org", Path("alpha-2")):
        ring = KeyRing(folder / "ring")
        assert ring.name_of(new) == "router" and ring.name_of(old) is None
    assert len(list(made.glob("issued/alpha-*.pem"))) == 2


def test_a_name_that_is_taken_out_of_the_authoritys_ring_leaves_all(made: Path, run: Callable[..., str]) -> None:
    (made / "ring" / "decode-0.pub").unlink()
    run(0, "host", "ca", "client")
    assert "decode-0" not in KeyRing(made / "hosts" / "alpha" / "ring").names().values()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("init ca --days 0", "--days must be between 1 and 3650, not 0"),
        ("host ca x --days 826", "--days must be between 1 and 825, not 826"),
        ("host ca ../x", "the host's name must be letters"),
        ("host ca x --address a/b", "--address must be a name or a number"),
        ("host ca x --process ../../etc", "--process must be 1 to 40 letters"),
        ("host ca x --process a --process a", "one name is given twice"),
        ("host nowhere x", "nowhere is no authority, it has no ca.key: make one with `quiesce keys init nowhere`"),
        ("show nowhere", "nowhere has no keys"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(run: Callable[..., str], words: str, says: str) -> None:
    if not words.startswith("init"):
        run(0, "init", "ca")
    said = run(2, *words.split())
    assert says in said and said.strip().count("\n") == 0


def test_an_authority_whose_key_others_can_read_or_that_is_mixed_up_signs_nothing(
    made: Path, run: Callable[..., str]
) -> None:
    (made / "ca.key").chmod(0o644)
    assert "others can read or change ca/ca.key" in run(2, "host", "ca", "gamma")
    (made / "ca.key").chmod(0o600)
    run(0, "init", "other")
    (made / "ca.key").write_bytes(Path("other/ca.key").read_bytes())
    assert "ca/ca.key is not the key of ca/ca.pem" in run(2, "host", "ca", "gamma")
    (made / "ca.key").write_text("junk")
    assert "cannot be used" in run(2, "host", "ca", "gamma")
    assert not (made / "hosts" / "gamma").exists()


def test_show_tells_until_when_and_fails_for_what_is_over(
    made: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(0, "show", "ca")
    assert "10.0.0.2" in said and "396 days left" in said and "may connect: decode-0, prefill-0, router" in said
    said = run(0, "show", "ca/hosts/alpha")
    assert "run here: prefill-0, router" in said and "PRIVATE" not in said
    hosts = make_hosts(Path("others"))
    assert "NOT IN FORCE" in run(1, "show", str(hosts.ended))
    assert "NOT IN FORCE" in run(0, "show", str(hosts.folder)), "one that was issued once"


def test_the_doctor_looks_at_the_certificate_too(made: Path, tmp_path: Path) -> None:
    alpha = made / "hosts" / "alpha"
    found = by_name(doctor_keys.keys(alpha))
    said(found["certificate"], "ok", "396 days")
    said(found["key ring"], "ok", "3 may connect")
    (alpha / "tls" / "host.key").chmod(0o640)
    found = by_name(doctor_keys.keys(alpha))
    said(found["key modes"], "fail", "host.key", "chmod 600")
    said(found["certificate"], "fail", "others can read")
    hosts = make_hosts(tmp_path / "others")
    said(by_name(doctor_keys.keys(hosts.ended))["certificate"], "fail", "expired", "--renew")
    authority.add_host(made, "brief", (), (), days=20)
    said(by_name(doctor_keys.keys(made / "hosts" / "brief"))["certificate"], "warn", "days")
