from __future__ import annotations

from quiesce.roles.silence import FORGOTTEN, Silence


def test_d7_who_is_silent_for_long_and_not_attached_is_given_up_and_nobody_else() -> None:
    now = [100.0]
    silence = Silence(now=lambda: now[0])
    for epoch in (1, 2, 3, 4):
        silence.heard(epoch)
    now[0] += FORGOTTEN / 2
    silence.heard(2)
    assert silence.gone(lambda epoch: False, ()) == []
    now[0] += FORGOTTEN / 2 + 1
    assert silence.gone(lambda epoch: epoch == 3, [4]) == [1], "2 spoke, 3 is attached, 4 owes a proof"
    silence.forget(1)
    assert silence.gone(lambda epoch: epoch == 3, [4]) == []
