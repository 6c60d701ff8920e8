"""Keeps one version's cached prefixes from serving another version's requests when the cache can't be flushed.

A flush is refused while requests run, and with `pause="in_place"` they are meant to go on with the keys and values
that they have. So the cache is left as it is, and every request that has not started yet gets another namespace (the
`extra_key` of upstream's radix cache, which it uses in the same way when expert parallelism changes size): it can't
match what older weights computed. Running requests keep theirs, and what they leave in the cache nobody new reaches.
"""

from __future__ import annotations

from typing import Any

_MARK = "sglang-rdt:"


class PrefixCacheNamespace:
    """Namespaces the requests of one scheduler. Installed once, on the rank; inactive until the first switch."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._namespace: str | None = None
        add = scheduler._add_request_to_queue

        def add_in_namespace(req: Any, *arguments: Any, **options: Any) -> None:
            self._apply(req)
            add(req, *arguments, **options)

        scheduler._add_request_to_queue = add_in_namespace

    def switch(self, namespace: str) -> None:
        """From now on, every request that is queued or comes in uses `namespace`. Generation must be paused."""
        self._namespace = namespace
        for req in list(self._scheduler.waiting_queue):
            self._apply(req)

    def _apply(self, req: Any) -> None:
        if self._namespace is None:
            return
        key = req.extra_key or ""
        if key.startswith(_MARK):
            key = key.partition("|")[2]
        # In front: upstream finds an adapter's id at the end.
        req.extra_key = f"{_MARK}{self._namespace}|{key}"
