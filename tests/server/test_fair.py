"""Whose turn it is: clients in turn, requests of a client in turn; nobody's texts fill the queue."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.server.scheduler import FairQueue

ITEMS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("12")), max_size=30)


def test_one_with_much_waits_for_one_with_little() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(64):
        queue.add("many", "one request", f"many {number}")
    assert queue.take()[2] == "many 0"
    queue.add("other", "short", "other")
    queue.add("many", "second request", "second")
    assert [queue.take()[2] for _ in range(4)] == ["many 1", "other", "second", "many 2"]
    assert (len(queue), queue.of("many"), queue.of("other")) == (61, 61, 0)


def test_what_was_taken_too_early_is_next_again() -> None:
    queue: FairQueue[int] = FairQueue()
    for client, item in (("a", 1), ("b", 2), ("a", 3)):
        queue.add(client, "r", item)
    taken = queue.take()
    queue.put_back(*taken)
    assert [queue.take()[2] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(IndexError):
        queue.take()
    queue.put_back(*taken)
    queue.remove(1)
    assert len(queue) == 0


@given(ITEMS)
def test_everything_comes_once_and_in_the_order_of_its_request(items: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    own: dict[tuple[str, str], deque[int]] = {}
    for number, (client, request) in enumerate(items):
        queue.add(client, request, number)
        own.setdefault((client, request), deque()).append(number)
    assert sorted(queue) == list(range(len(items)))
    turns: list[str] = []
    while len(queue):
        client, request, item = queue.take()
        assert own[client, request].popleft() == item
        waiting = {client for (client, _), left in own.items() if left}
        for other in waiting - {client}:  # nobody has two turns while another one waits
            assert turns[-len(waiting) :].count(client) <= 1 or other in turns[-len(waiting) :]
        turns.append(client)
