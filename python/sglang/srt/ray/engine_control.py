"""Implementations of `weight_sync.control.EngineControl`: an engine behind an HTTP address, and a local RayEngine.

Both say the same things in the same order; they differ in the wire only. An engine behind HTTP is given together with
its actor handles, because refs travel by actor call and never over HTTP.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Sequence
from typing import Any

import requests

from sglang.srt.ray.weight_sync.control import PauseMode
from sglang.srt.ray.weight_sync.errors import DeadlineExceededError, EngineRequestError


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
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def actors(self) -> Sequence[Any]:
        return self._actors

    def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        self._post("pause_generation", {"mode": mode}, timeout_s)

    def begin(self, *, timeout_s: float) -> None:
        self._post("begin_weight_update", {}, timeout_s)

    def end(self, *, timeout_s: float) -> None:
        self._post("end_weight_update", {}, timeout_s)

    def flush(self, *, timeout_s: float) -> None:
        self._post("flush_cache", None, timeout_s)

    def set_version(self, version: str, *, timeout_s: float) -> None:
        self._post(
            "update_weight_version",
            {"new_version": version, "abort_all_requests": False},
            timeout_s,
        )

    def resume(self, *, timeout_s: float) -> None:
        self._post("continue_generation", {"torch_empty_cache": False}, timeout_s)

    def _post(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> None:
        try:
            answer = self._session.post(f"{self._url}/{path}", json=body, timeout=timeout_s)
        except requests.Timeout as error:
            raise DeadlineExceededError(
                f"POST {self._url}/{path} was not answered within {timeout_s:g} s",
                engine=self._name,
            ) from error
        except requests.RequestException as error:
            raise EngineRequestError(
                f"POST {self._url}/{path} failed: {error}", engine=self._name
            ) from error
        if answer.status_code != requests.codes.ok:
            raise EngineRequestError(
                f"POST {self._url}/{path} with {body!r} was refused with status {answer.status_code}: "
                f"{answer.text.strip()}",
                engine=self._name,
            )


class LocalEngineControl:
    """Steers a RayEngine of this process. Its event loop must run on the calling thread or not run at all."""

    def __init__(self, engine: Any, *, name: str = "local") -> None:
        """Args:
        engine: a `RayEngine`.
        name: what errors and reports call the engine.
        """
        self._engine = engine
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def actors(self) -> Sequence[Any]:
        return self._engine._scheduler_init_result.scheduler_actors

    def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._run(
            "pause", self._manager.pause_generation(PauseGenerationReqInput(mode=mode)), timeout_s
        )

    def begin(self, *, timeout_s: float) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._succeed(
            "begin", self._manager.begin_weight_update(BeginWeightUpdateReqInput()), timeout_s
        )

    def end(self, *, timeout_s: float) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._succeed("end", self._manager.end_weight_update(EndWeightUpdateReqInput()), timeout_s)

    def flush(self, *, timeout_s: float) -> None:
        answer = self._run("flush", self._manager.flush_cache(), timeout_s)
        if not answer.success:
            raise EngineRequestError(
                f"the prefix cache was not flushed: {answer.message!r}", engine=self._name
            )

    def set_version(self, version: str, *, timeout_s: float) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._run("version", self._manager.update_weight_version(request), timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        request = ContinueGenerationReqInput(torch_empty_cache=False)
        self._run("resume", self._manager.continue_generation(request), timeout_s)

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager

    def _succeed(self, what: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        success, message = self._run(what, call, timeout_s)
        if not success:
            raise EngineRequestError(f"{what} was refused: {message!r}", engine=self._name)

    def _run(self, what: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        bounded = asyncio.wait_for(call, timeout_s)
        loop = self._engine.loop
        try:
            if loop.is_running():
                return asyncio.run_coroutine_threadsafe(bounded, loop).result(timeout_s)
            return loop.run_until_complete(bounded)
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise DeadlineExceededError(
                f"{what} was not answered within {timeout_s:g} s", engine=self._name
            ) from error
