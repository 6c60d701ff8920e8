"""Implementations of `weight_sync.control.EngineControl`: an engine behind an HTTP address, and a local RayEngine.

Both reach the same fence (`weight_fence.py`) and differ in the wire only. An engine behind HTTP is given together with
its actor handles, because refs travel by actor call and never over HTTP.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

from sglang.srt.ray.weight_sync import errors
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    EngineRequestError,
    WeightSyncError,
)

_ANSWER_MARGIN_S = 2.0
"""How much longer we wait than the engine was told to: its own error says more than a timeout here."""


class _RetryLostReplies(Retry):
    """Asks again after a broken connection, never after a deadline: that wait was the caller's whole budget."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: Any = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: Any = None,
    ) -> Self:
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, _pool, _stacktrace)


class HttpEngineControl:
    """Steers an engine that `serve_http` or `launch_server` serves, from any process that reaches its port."""

    def __init__(
        self,
        url: str,
        actors: Sequence[Any],
        *,
        name: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Args:
        url: such as `http://127.0.0.1:30000`.
        actors: the engine's SchedulerActor handles, in rank order.
        name: what errors and reports call the engine; its address when None.
        api_key: the admin key (or the API key) when the engine asks for one.
        """
        self._url = url.rstrip("/")
        self._actors = list(actors)
        self._name = name or self._url
        self._session = requests.Session()
        self._session.trust_env = (
            False  # engines are inside the cluster: a proxy for the outside is not asked
        )
        # Every call may be repeated (it names its transaction), so a lost reply is asked for again.
        retry = _RetryLostReplies(total=3, backoff_factor=0.05, allowed_methods=None, status=0)
        self._session.mount("http://", HTTPAdapter(max_retries=retry))
        self._session.mount("https://", HTTPAdapter(max_retries=retry))
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def actors(self) -> Sequence[Any]:
        return self._actors

    def open(self, request: OpenRequest, *, timeout_s: float) -> Mapping[str, Any]:
        return self._call("POST", "/open", timeout_s, dataclasses.asdict(request))

    def seal(self, transaction: str, *, resume: bool, timeout_s: float) -> Mapping[str, Any]:
        return self._call(
            "POST", "/seal", timeout_s, {"transaction": transaction, "resume": resume}
        )

    def resume(self, transaction: str, *, timeout_s: float) -> Mapping[str, Any]:
        return self._call("POST", "/resume", timeout_s, {"transaction": transaction})

    def abort(self, transaction: str, reason: str, *, timeout_s: float) -> Mapping[str, Any]:
        return self._call(
            "POST", "/abort", timeout_s, {"transaction": transaction, "reason": reason}
        )

    def status(self, *, timeout_s: float) -> Mapping[str, Any]:
        return self._call("GET", "", timeout_s, None)

    def _call(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None
    ) -> Mapping[str, Any]:
        url = f"{self._url}/weight_sync{path}"
        if body is not None:
            body["timeout_s"] = timeout_s
        try:
            answer = self._session.request(
                method, url, json=body, timeout=timeout_s + _ANSWER_MARGIN_S
            )
        except requests.Timeout as error:
            raise DeadlineExceededError(
                f"{method} {url} was not answered within {timeout_s:g} s", engine=self._name
            ) from error
        except requests.RequestException as error:
            raise EngineRequestError(
                f"{method} {url} failed: {error}", engine=self._name
            ) from error
        if answer.status_code != requests.codes.ok:
            raise self._refusal(f"{method} {url}", answer)
        content: Mapping[str, Any] = answer.json()
        return content

    def _refusal(self, what: str, answer: requests.Response) -> WeightSyncError:
        """The engine's own error again, by its class name; any other answer as an EngineRequestError."""
        try:
            return errors.retold(answer.json()["error"], engine=self._name)
        except (ValueError, KeyError, TypeError, AttributeError):
            text = answer.text.strip()
            return EngineRequestError(
                f"{what} was refused with status {answer.status_code}: {text}", engine=self._name
            )


class LocalEngineControl:
    """Steers a RayEngine of this process, or one that this process launched and serves.

    Where nothing runs the engine's event loop between calls (a RayEngine driven synchronously), the engine notices an
    expired transaction at the next call.
    """

    def __init__(self, engine: Any, *, name: str = "local") -> None:
        """Args:
        engine: a `RayEngine` or a `LaunchedEngine`.
        name: what errors and reports call the engine.
        """
        self._engine = engine
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def actors(self) -> Sequence[Any]:
        result = getattr(self._engine, "_scheduler_init_result", None) or getattr(
            self._engine, "scheduler_init_result", None
        )
        if (actors := getattr(result, "scheduler_actors", None)) is None:
            raise errors.EngineWithoutActorsError(
                f"the ranks of {type(self._engine).__name__} are no Ray actors, so object refs can't reach them; use "
                f"RayEngine, launch_engine or --use-ray",
                engine=self._name,
            )
        return list(actors)

    def open(self, request: OpenRequest, *, timeout_s: float) -> Mapping[str, Any]:
        return self._run("open", self._fence.open(request, timeout_s=timeout_s), timeout_s)

    def seal(self, transaction: str, *, resume: bool, timeout_s: float) -> Mapping[str, Any]:
        return self._run(
            "seal", self._fence.seal(transaction, resume=resume, timeout_s=timeout_s), timeout_s
        )

    def resume(self, transaction: str, *, timeout_s: float) -> Mapping[str, Any]:
        return self._run("resume", self._fence.resume(transaction, timeout_s=timeout_s), timeout_s)

    def abort(self, transaction: str, reason: str, *, timeout_s: float) -> Mapping[str, Any]:
        return self._run(
            "abort", self._fence.abort(transaction, reason, timeout_s=timeout_s), timeout_s
        )

    def status(self, *, timeout_s: float) -> Mapping[str, Any]:
        return dict(self._fence.status())

    @property
    def _fence(self) -> Any:
        fence = getattr(self._engine.tokenizer_manager, "weight_fence", None)
        if fence is None:
            raise errors.WeightSyncDisabledError(
                "this engine was started without weight sync; start it with enable_rdt_weight_sync=True",
                engine=self._name,
            )
        return fence

    def _run(
        self, what: str, call: Coroutine[Any, Any, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        loop = self._engine.tokenizer_manager.event_loop or getattr(self._engine, "loop", None)
        if loop is None:
            raise EngineRequestError(
                "the engine's event loop does not run yet; serve it first", engine=self._name
            )
        try:
            if loop.is_running():
                future = asyncio.run_coroutine_threadsafe(call, loop)
                return future.result(timeout_s + _ANSWER_MARGIN_S)
            return loop.run_until_complete(asyncio.wait_for(call, timeout_s + _ANSWER_MARGIN_S))
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            if isinstance(error, WeightSyncError):
                raise
            raise DeadlineExceededError(
                f"{what} was not answered within {timeout_s:g} s", engine=self._name
            ) from error
