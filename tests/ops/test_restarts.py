from __future__ import annotations

from quiesce.ops.restarts import EXIT_SETTINGS, HEALTHY, LONGEST_DELAY, START_FAILURES, Restarts


def test_the_delay_doubles_up_to_the_longest_and_never_gives_up_on_what_once_was_ready() -> None:
    restarts = Restarts()
    assert restarts.ready(0.0)
    delays = [restarts.died(1.0, -9) for _ in range(60)]
    assert delays[:7] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    assert set(delays[7:]) == {LONGEST_DELAY}


def test_half_a_minute_of_health_forgets_earlier_deaths() -> None:
    restarts = Restarts()
    restarts.ready(0.0)
    restarts.died(1.0, 1)
    restarts.ready(2.0)
    assert restarts.died(2.0 + HEALTHY - 0.1, 1) == 0.4
    restarts.ready(100.0)
    assert restarts.died(100.0 + HEALTHY, 1) == 0.2


def test_health_that_was_interrupted_counts_from_anew() -> None:
    restarts = Restarts()
    restarts.ready(0.0)
    restarts.died(0.5, 1)
    restarts.ready(1.0)
    restarts.unready()
    assert restarts.ready(25.0)
    assert not restarts.ready(26.0)
    assert restarts.died(40.0, 1) == 0.4


def test_what_was_never_ready_is_given_up_after_five_deaths() -> None:
    restarts = Restarts()
    delays = [restarts.died(float(i), 1) for i in range(START_FAILURES)]
    assert delays == [0.2, 0.4, 0.8, 1.6, None]


def test_settings_that_cannot_work_are_given_up_at_once_unless_they_once_worked() -> None:
    assert Restarts().died(0.0, EXIT_SETTINGS) is None
    restarts = Restarts()
    restarts.ready(0.0)
    assert restarts.died(1.0, EXIT_SETTINGS) == 0.2
