"""Multi-turn sessions of one replica: which are open here, on which data-parallel rank, and until when.

Affinity is Serve's: a consistent hash of the session's key picks the replica, without a second choice. The replica only
keeps the list, so that a turn which reaches it because the ring changed is told so instead of starting cold in silence.
What a session saves is the prefix cache of that replica (and rank), which needs no other state of ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator
from http import HTTPStatus

SESSION_ID = "x-session-id"
"""The header between ingress and replica, whatever the client's is called."""
DEFAULT_IDLE_S = 600.0
_ENDED_KEPT = 10_000
"""How many ended sessions are remembered by their reason."""


class SessionError(RuntimeError):
    """A turn that can't go on here; `status` is its HTTP status, and the text says what to do."""

    status: int = HTTPStatus.GONE


class SessionGoneError(SessionError):
    """It was closed, it expired, or its replica was replaced."""


class SessionMovedError(SessionError):
    """The set of replicas changed, so Serve routes it to a replica that doesn't have its cache."""

    status = HTTPStatus.CONFLICT


class UnknownSessionError(SessionError):
    """Not an id that `POST /sessions` gives."""

    status = HTTPStatus.NOT_FOUND


def new_key() -> str:
    """What Serve hashes: minted before the replica is known."""
    return f"s-{uuid.uuid4().hex}"


def key_of(session: str) -> str:
    """The part of a session's id that Serve hashes."""
    return session.partition(".")[0]


@dataclasses.dataclass(kw_only=True)
class Session:
    """One open session."""

    id: str
    dp_rank: int | None
    """The data-parallel rank that its turns go to; None in an engine of one."""
    idle_s: float
    last_used: float
    turns: int = 0
    active: int = 0
    """Turns that run now; a session in use doesn't expire."""
    reopened: bool = False
    """Whether it was opened again here after its replica was lost."""


class SessionTable:
    """The sessions of one replica. Belongs to its event loop."""

    def __init__(
        self, replica: str, *, num_dp_ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replica = replica
        self._num_dp_ranks = num_dp_ranks
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._ended: dict[str, str] = {}

    def open(self, key: str, *, idle_s: float = DEFAULT_IDLE_S) -> Session:
        """Open a session on this replica, on the data-parallel rank that has the fewest.

        Args:
            key: what Serve hashed to get here.
            idle_s: it expires when no turn runs for this many seconds.
        """
        return self._add(f"{key}.{self._replica}", idle_s=idle_s, reopened=False)

    def close(self, session_id: str) -> Session:
        """End a session.

        Raises:
            SessionError: it is not open here.
        """
        session = self._find(session_id)
        self._end(session, "it was closed")
        return session

    def find(self, session_id: str) -> Session:
        """Raises:
        SessionError: it is not open here.
        """
        return self._find(session_id)

    @contextlib.contextmanager
    def turn(self, session_id: str, *, has_full_history: bool) -> Iterator[Session]:
        """One request of a session.

        Args:
            has_full_history: whether the request says everything, so that a session which is lost can begin again.

        Raises:
            SessionError: it is not open here, and can't be opened again.
        """
        try:
            session = self._find(session_id)
        except UnknownSessionError:
            raise
        except SessionError:
            if not has_full_history:
                raise
            session = self._add(session_id, idle_s=DEFAULT_IDLE_S, reopened=True)
        session.active += 1
        session.turns += 1
        try:
            yield session
        finally:
            session.active -= 1
            session.last_used = self._clock()

    def __len__(self) -> int:
        self._expire()
        return len(self._open)

    def _add(self, session_id: str, *, idle_s: float, reopened: bool) -> Session:
        self._expire()
        session = Session(
            id=session_id,
            dp_rank=self._quietest_rank(),
            idle_s=idle_s,
            last_used=self._clock(),
            reopened=reopened,
        )
        self._open[session_id] = session
        self._ended.pop(session_id, None)
        return session

    def _quietest_rank(self) -> int | None:
        if self._num_dp_ranks <= 1:
            return None
        counts = [0] * self._num_dp_ranks
        for session in self._open.values():
            if session.dp_rank is not None:
                counts[session.dp_rank] += 1
        return counts.index(min(counts))

    def _find(self, session_id: str) -> Session:
        self._expire()
        if (session := self._open.get(session_id)) is not None:
            return session
        key, dot, opened_on = session_id.partition(".")
        if not dot or not key.startswith("s-"):
            raise UnknownSessionError(
                f"{session_id!r} is not a session's id; POST /sessions opens one and says its id"
            )
        if opened_on != self._replica:
            raise SessionMovedError(
                f"session {session_id!r} was opened on replica {opened_on!r}, and the fleet has changed since: Serve "
                f"routes it to {self._replica!r}, which has none of its cache. Open a new session, or repeat the turn "
                f"with its full history and the header 'x-session-history: full'"
            )
        reason = self._ended.get(session_id, "it is not known here")
        raise SessionGoneError(
            f"session {session_id!r} is over: {reason}. Open a new session, or repeat the turn with its full history "
            f"and the header 'x-session-history: full'"
        )

    def _expire(self) -> None:
        now = self._clock()
        for session in list(self._open.values()):
            if not session.active and now - session.last_used > session.idle_s:
                self._end(session, f"no turn came for {session.idle_s:g} s")

    def _end(self, session: Session, reason: str) -> None:
        del self._open[session.id]
        self._ended[session.id] = reason
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
