"""What a check says, and how a list of checks is gone through.

A check is a small function that looks at one thing and yields findings; it does not print and it does not end the
process. One that raises is itself a finding, a failure with the exception as its cause.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    """What was looked at, in a word or two."""
    status: Status
    """`warn`: works, but slower or otherwise than meant; `fail`: an engine or a sync can't work so."""
    text: str
    """One sentence: what was found and, where it is not ok, what to do."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The same as JSON values, for programs."""

    @property
    def line(self) -> str:
        return f"{self.status:<4}  {self.check:<13}  {' '.join(self.text.split())}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What the checks look at, besides the machine itself."""

    environment: Mapping[str, str]
    address: str | None
    """Of the Ray cluster; None looks for a running one as `launch_server --ray` does."""


Check = Callable[[Place], Iterable[Finding]]


def examined(checks: Mapping[str, Check], place: Place) -> Iterator[Finding]:
    """The findings of all checks, each as soon as it is known."""
    for name, check in checks.items():
        try:
            yield from check(place)
        except Exception as error:  # whatever it is, it is this check's result
            cause = str(error) or repr(error)
            yield Finding(
                check=name,
                status="fail",
                text=f"the check ended with {type(error).__name__}: {cause}",
                facts={"error": type(error).__name__, "message": cause},
            )


def worst(findings: Iterable[Finding]) -> Status:
    """The status of the whole report."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((finding.status for finding in findings), key=order.index, default="ok")
