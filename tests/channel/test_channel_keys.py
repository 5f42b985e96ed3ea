from __future__ import annotations

import stat
from pathlib import Path

import pytest

from quiesce.channel import KeyPair, KeyRing


def test_a_key_pair_survives_its_file_and_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    pair = KeyPair.generate()
    path = tmp_path / "router.key"
    pair.save(path)
    assert KeyPair.load(path) == pair
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["router.key"]


def test_the_secret_half_is_not_printed() -> None:
    pair = KeyPair.generate()
    assert pair.secret not in repr(pair)


def test_loading_refuses_what_is_not_a_key_pair(tmp_path: Path) -> None:
    path = tmp_path / "x.key"
    path.write_text("hello\n")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"x\.key is not a key pair: expected two lines"):
        KeyPair.load(path)
    path.write_text(f"{KeyPair.generate().public}\n{KeyPair.generate().secret}\n")
    with pytest.raises(ValueError, match="halves do not belong together"):
        KeyPair.load(path)


def test_a_pair_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.key"
    KeyPair.generate().save(path)
    for mode in (0o640, 0o604, 0o620, 0o666):
        path.chmod(mode)
        with pytest.raises(ValueError, match=rf"others can read or change .*x\.key \(mode {mode:04o}\): chmod 600"):
            KeyPair.load(path)
    path.chmod(0o400)
    assert KeyPair.load(path).public


def test_a_ring_knows_names_by_key_and_forgets_what_is_removed(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "ring")
    one, two = KeyPair.generate(), KeyPair.generate()
    ring.add("prefill-0", one.public)
    ring.add("decode-0", two.public)
    assert ring.name_of(two.public) == "decode-0"
    ring.add("prefill-0", KeyPair.generate().public)
    assert ring.name_of(one.public) is None
    ring.remove("decode-0")
    assert ring.name_of(two.public) is None
