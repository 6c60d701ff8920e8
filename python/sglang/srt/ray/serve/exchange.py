"""One HTTP exchange as plain data, so that it can travel from the ingress to a replica and back.

The ingress hands a client's request over as it came, and the replica's answer goes back byte for byte: what SGLang's
own handlers put into a response (log-probabilities, token ids, `meta_info`) can't get lost on the way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

Headers = tuple[tuple[str, str], ...]

_NOT_FORWARDED = frozenset({"connection", "content-length", "host", "transfer-encoding"})
"""Headers of one connection, which the next one makes itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpCall:
    """A client's request."""

    method: str
    path: str
    query: str = ""
    headers: Headers = ()
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The first header of that name, in any case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def with_headers(self, added: Sequence[tuple[str, str]]) -> HttpCall:
        """The same request with these headers in place of older ones of their names."""
        names = {key for key, _ in added}
        kept = tuple((key, value) for key, value in self.headers if key.lower() not in names)
        return dataclasses.replace(self, headers=(*kept, *added))

    @classmethod
    def json(cls, path: str, body: Any, headers: Headers = ()) -> HttpCall:
        """A POST of JSON."""
        return cls(
            method="POST",
            path=path,
            headers=(*headers, ("content-type", "application/json")),
            body=json.dumps(body).encode(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """How an answer begins; its body follows in pieces."""

    status: int
    headers: Headers = ()

    def with_headers(self, added: Mapping[str, str]) -> Head:
        return Head(status=self.status, headers=(*self.headers, *added.items()))


def forwarded(headers: Sequence[tuple[str, str]]) -> Headers:
    """The headers that belong to the message and not to the connection."""
    return tuple((key, value) for key, value in headers if key.lower() not in _NOT_FORWARDED)


def refusal(status: int, kind: str, message: str, **more: Any) -> tuple[Head, bytes]:
    """An error in the shape that OpenAI's clients read."""
    error = {"type": kind, "message": message, "code": status, **more}
    return (
        Head(status=status, headers=(("content-type", "application/json"),)),
        json.dumps({"error": error}).encode(),
    )
