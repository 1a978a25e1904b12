"""The lock of an engine goes to the longest-waiting thread, not to the first that comes back."""

from __future__ import annotations

import threading
import time

from edgespec.engine.sharing import FairLock


def until_waiting(turns: FairLock, count: int) -> None:
    """Wait until ``count`` threads wait for it."""
    end = time.monotonic() + 120
    while turns.waiting < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_it_is_handed_over_in_the_order_of_coming() -> None:
    turns, order = FairLock(), []
    threads: list[threading.Thread] = []

    def take(name: str) -> None:
        with turns:
            order.append(name)

    with turns:
        for number in range(4):
            threads.append(threading.Thread(target=take, args=(f"other {number}",)))
            threads[-1].start()
            until_waiting(turns, number + 1)
        with turns:  # the owner takes it again
            order.append("mine")
        assert turns.waiting == 4
    with turns:  # at once, before any of them can have woken up
        order.append("back")
    for thread in threads:
        thread.join(120)
    assert order == ["mine", *(f"other {number}" for number in range(4)), "back"]


def test_nobody_is_in_it_together() -> None:
    turns, inside, seen = FairLock(), [0], set()

    def work() -> None:
        for _ in range(300):
            with turns:
                inside[0] += 1
                seen.add(inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (seen, turns.waiting, inside) == ({1}, 0, [0])


def test_an_error_frees_it() -> None:
    turns = FairLock()
    for _ in range(2):
        try:
            with turns:
                raise ValueError
        except ValueError:
            pass
    other = threading.Thread(target=lambda: turns.__enter__())
    other.start()
    other.join(120)
    assert not other.is_alive()
