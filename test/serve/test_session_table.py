"""The sessions of one replica, without Ray: opening, turns, expiry, and what a turn without a session is told."""

from __future__ import annotations

import pytest

from sglang.srt.ray.serve.sessions import (
    SessionGoneError,
    SessionMovedError,
    SessionTable,
    UnknownSessionError,
    key_of,
    new_key,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def table(clock: Clock, replica: str = "r1", ranks: int = 1) -> SessionTable:
    return SessionTable(replica, num_dp_ranks=ranks, clock=clock)


def turn(sessions: SessionTable, session_id: str, *, full: bool = False):
    with sessions.turn(session_id, has_full_history=full) as session:
        return session


def test_an_id_carries_what_serve_hashed_and_where_it_was_opened(clock):
    key = new_key()
    session = table(clock).open(key)
    assert session.id == f"{key}.r1"
    assert key_of(session.id) == key


def test_turns_are_counted_and_keep_a_session_alive(clock):
    sessions = table(clock)
    session = sessions.open(new_key(), idle_s=10)
    for _ in range(5):
        clock.now += 9
        assert turn(sessions, session.id) is session
    assert session.turns == 5
    clock.now += 11
    with pytest.raises(SessionGoneError, match="no turn came for 10 s"):
        turn(sessions, session.id)


def test_a_turn_that_runs_long_does_not_expire(clock):
    sessions = table(clock)
    session = sessions.open(new_key(), idle_s=10)
    with sessions.turn(session.id, has_full_history=False):
        clock.now += 100
        assert len(sessions) == 1
    clock.now += 9
    assert len(sessions) == 1


def test_a_closed_session_is_gone_and_says_why(clock):
    sessions = table(clock)
    session = sessions.open(new_key())
    sessions.close(session.id)
    with pytest.raises(SessionGoneError, match=r"it was closed.*Open a new session"):
        turn(sessions, session.id)
    with pytest.raises(SessionGoneError):
        sessions.close(session.id)


def test_a_session_of_another_replica_has_moved_and_starts_again_only_with_its_history(clock):
    session = table(clock, "r1").open(new_key())
    other = table(clock, "r2")
    with pytest.raises(SessionMovedError, match=r"'r1'.*'r2'.*x-session-history: full"):
        turn(other, session.id)
    assert turn(other, session.id, full=True).reopened
    assert turn(other, session.id).turns == 2, "from then on it is a session of this replica"


@pytest.mark.parametrize("session_id", ["", "mine", "s-1", "mine.r1"])
def test_an_id_that_nobody_gave_is_unknown_even_with_history(clock, session_id):
    with pytest.raises(UnknownSessionError, match="POST /sessions"):
        turn(table(clock), session_id, full=True)


def test_sessions_are_spread_over_the_data_parallel_ranks_and_stay_there(clock):
    sessions = table(clock, ranks=2)
    opened = [sessions.open(new_key()) for _ in range(4)]
    assert [session.dp_rank for session in opened] == [0, 1, 0, 1]
    sessions.close(opened[1].id)
    assert sessions.open(new_key()).dp_rank == 1
    assert turn(sessions, opened[2].id).dp_rank == 0
