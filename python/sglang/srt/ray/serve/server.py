"""One replica: an engine that the replica's own process launched, behind Serve's handles.

Requests are handed to SGLang's own application in this process (`hosted_app.py`), control verbs to `verbs.py`; a fleet,
where there is one, steers the replica through `agent.py`. Ray's stock SGLangServer is replaced, not derived from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import ray

from sglang.srt.ray.serve.exchange import Head, HttpCall, refusal
from sglang.srt.ray.serve.openai_methods import OpenAIMethods
from sglang.srt.ray.serve.options import deployment_options, server_arguments
from sglang.srt.ray.serve.results import ReplicaResult
from sglang.srt.ray.serve.sessions import (
    SESSION_ID,
    Session,
    SessionError,
    SessionGoneError,
    SessionTable,
)

if TYPE_CHECKING:
    from ray.serve.llm import LLMConfig

    from sglang.srt.ray.serve.agent import FleetAgent
    from sglang.srt.ray.weight_sync.report import SyncReport

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 60.0
_GATED = frozenset({"pause", "resume", "weight_open"})
"""Verbs that pause or resume: not in the middle of an admission."""
REPLICA_HEADER = "x-sglang-replica"
"""In every answer: which replica gave it."""
REOPENED_HEADER = "x-session-reopened"
"""In answers of a session: whether it began again here, without its cache."""


class SGLangServer(OpenAIMethods):
    """`LLMConfig(server_cls="sglang.srt.ray.serve:SGLangServer")`. All methods run on the replica's event loop."""

    joining_class: type[Any] | None = None
    """A subclass may join in another way; `joining.Joining` when None."""

    async def __init__(self, llm_config: LLMConfig, *, fleet: Any = None) -> None:  # type: ignore[misc]
        """Launch the engine and answer its first request; Serve routes to the replica once this returns.

        Args:
            llm_config: what to serve.
            fleet: handle of the model's `FleetControl`; None with a builder that knows none.

        Raises:
            LaunchError, PlacementError, ValueError: the engine could not be started; nothing is left of it.
        """
        from sglang.srt.ray.launch import launch_engine
        from sglang.srt.ray.serve.hosted_app import HostedApp
        from sglang.srt.ray.serve.verbs import ReplicaVerbs
        from sglang.srt.server_args import ServerArgs

        self._llm_config = llm_config
        self._broken: Exception | None = None
        self._fleet = fleet
        self._agent: FleetAgent | None = None
        self.replica_id = _replica_id()
        arguments = server_arguments(llm_config) | {"use_ray": True, "port": _free_port()}
        if llm_config.log_engine_metrics:
            arguments["enable_metrics"] = True
            arguments.setdefault("extra_metric_labels", _metric_labels())
        server_args = ServerArgs(**arguments)
        self._engine = await asyncio.to_thread(launch_engine, server_args)
        try:
            self._app = HostedApp(self._engine, server_args)
            await self._app.start()
            self._verbs = ReplicaVerbs(self._engine)
            self._sessions = SessionTable(
                self.replica_id, num_dp_ranks=int(llm_config.engine_kwargs.get("dp_size") or 1)
            )
            if fleet is not None:
                await self._join(fleet)
        except BaseException:
            await asyncio.to_thread(self._engine.shutdown)
            raise

    async def _join(self, fleet: Any) -> None:
        """Connect to the fleet, and return once it lets this replica serve."""
        from sglang.srt.ray.serve.agent import FleetAgent
        from sglang.srt.ray.serve.joining import Joining, published_weights

        info = {
            "actor": ray.get_runtime_context().current_actor,
            "ranks": list(self._engine.scheduler_actors),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }
        agent = self._agent = FleetAgent(
            fleet,
            self.replica_id,
            info,
            perform=self._perform,
            serves=lambda: published_weights(self._engine),
        )
        self._joining = (self.joining_class or Joining)(
            agent, self._engine, self._verbs, self.replica_id
        )
        self._tell_of_failures(asyncio.get_running_loop())
        await agent.join()
        await self._joining.become_current()

    async def _perform(
        self, verb: str, arguments: Mapping[str, Any], deadline_s: float
    ) -> Mapping[str, Any]:
        """What the fleet commands: a control verb, or to catch up with what was published without this replica."""
        if verb in _GATED:
            async with self._joining.gate:
                return await self._verbs.perform(verb, arguments, deadline_s)
        if verb != "catch_up":
            return await self._verbs.perform(verb, arguments, deadline_s)
        assert self._agent is not None
        try:
            await self._joining.become_current()
        except Exception as error:
            self._broken = error
            await self._agent.broke(f"it can't take the published weights over: {error}")
            raise
        return await self._verbs.state()

    def _tell_of_failures(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the fleet know of a dead engine at once: Serve itself takes three health checks to act on it."""
        agent = self._agent
        assert agent is not None

        def tell(failure: Exception) -> None:  # on the thread of the engine's watch
            asyncio.run_coroutine_threadsafe(agent.broke(str(failure)), loop)

        watch = self._engine.scheduler_init_result.watch
        assert watch is not None
        watch.on_failure(tell)

    # Serving

    async def http(self, call: HttpCall) -> AsyncIterator[Head | bytes]:
        """A client's request, answered by SGLang's own endpoint: the head, then the body in pieces."""
        if self._verbs.asleep:
            head, body = refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "EngineAsleepError",
                f"this engine released {self._verbs.asleep!r}: wake it up first (POST /wakeup)",
            )
            yield head.with_headers({REPLICA_HEADER: self.replica_id})
            yield body
            return
        session_id = call.header(SESSION_ID)
        if session_id is not None and (failure := self._engine.failure) is not None:
            head, body = _lost_with_its_engine(session_id, failure)
            yield head.with_headers({REPLICA_HEADER: self.replica_id})
            yield body
            return
        try:
            with contextlib.ExitStack() as turn:
                added = {REPLICA_HEADER: self.replica_id}
                if session_id is not None:
                    full = call.header("x-session-history") == "full"
                    session = turn.enter_context(
                        self._sessions.turn(session_id, has_full_history=full)
                    )
                    added |= _session_headers(session)
                    call = _to_its_rank(call, session)
                async with contextlib.aclosing(self._app.exchange(call)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        yield piece.with_headers(added) if isinstance(piece, Head) else piece
        except SessionError as error:
            head, body = refusal(error.status, type(error).__name__, str(error))
            yield head.with_headers({REPLICA_HEADER: self.replica_id})
            yield body

    async def session(self, verb: str, arguments: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Open, find or close a session: HTTP status and body."""
        try:
            act: Any = {
                "open": self._sessions.open,
                "find": self._sessions.find,
                "close": self._sessions.close,
            }[verb]
            session: Session = act(**arguments)
        except SessionError as error:
            told = {"type": type(error).__name__, "message": str(error), "code": error.status}
            return int(error.status), {"error": told}
        status = HTTPStatus.CREATED if verb == "open" else HTTPStatus.OK
        return int(status), {
            "session_id": session.id,
            "replica": self.replica_id,
            "dp_rank": session.dp_rank,
            "turns": session.turns,
            "idle_s": session.idle_s,
            "closed": verb == "close",
        }

    # Control: for a fleet's command, a handle's `broadcast` and Ray's own protocol alike

    async def control(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        deadline_s: float = CONTROL_TIMEOUT_S,
    ) -> ReplicaResult:
        """Perform a verb on this replica; what became of it is in the result, which says who answers."""
        from sglang.srt.ray.serve.agent import perform_within

        return await perform_within(
            self._verbs.perform, self.replica_id, verb, arguments or {}, deadline_s
        )

    async def pause(self, **options: Any) -> Mapping[str, Any]:
        return await self._verbs.pause(deadline_s=CONTROL_TIMEOUT_S, **options)

    async def resume(self) -> Mapping[str, Any]:
        return await self._verbs.resume(deadline_s=CONTROL_TIMEOUT_S)

    async def is_paused(self) -> bool:
        return bool((await self._verbs.state())["paused"])

    async def sleep(self, tags: Sequence[str] | None = None) -> Mapping[str, Any]:
        return await self._verbs.sleep(tags=tags, deadline_s=CONTROL_TIMEOUT_S)

    async def wakeup(self, tags: Sequence[str] | None = None) -> Mapping[str, Any]:
        return await self._verbs.wakeup(tags=tags, deadline_s=CONTROL_TIMEOUT_S)

    async def is_sleeping(self) -> bool:
        return bool((await self._verbs.state())["asleep"])

    async def reset_prefix_cache(self) -> Mapping[str, Any]:
        return await self._verbs.reset_prefix_cache(deadline_s=CONTROL_TIMEOUT_S)

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> Mapping[str, Any]:
        return await self._verbs.collective_rpc(
            method=method, args=args, deadline_s=CONTROL_TIMEOUT_S
        )

    async def start_profile(self, **options: Any) -> Mapping[str, Any]:
        return await self._verbs.start_profile(deadline_s=CONTROL_TIMEOUT_S, **options)

    async def stop_profile(self) -> Mapping[str, Any]:
        return await self._verbs.stop_profile(deadline_s=CONTROL_TIMEOUT_S)

    # Weights

    async def update_weights_from_object_ref(
        self, refs: Any, *, version: str, **options: Any
    ) -> SyncReport:
        """Bring every replica of the fleet to the weights in `refs`, through the engines' own loaders.

        One call on one replica, not a broadcast: it is one transaction over all of them. With a builder that knows no
        fleet it is this engine's alone. `refs` go inside a list, or Serve and Ray resolve them on the way; `options` as
        for `weight_sync.load_object_refs`, which says what is raised and what is then served.
        """
        from sglang.srt.ray.engine_control import LocalEngineControl
        from sglang.srt.ray.serve.weights import controls_of
        from sglang.srt.ray.weight_sync.loading import load_object_refs

        def load() -> SyncReport:
            mine = self._fleet is None
            controls = [LocalEngineControl(self._engine)] if mine else controls_of(self._fleet)
            return load_object_refs(controls, refs, version=version, **options)

        return await asyncio.to_thread(load)

    # Life

    async def start(self) -> None:
        """Of Ray's protocol; everything is started by the constructor."""

    async def check_health(self) -> None:
        """Called by Serve every `health_check_period_s`; a dead rank, detokenizer or router fails it at once.

        Raises:
            EngineFailedError: naming the part that died; Serve replaces the replica.
            WeightSyncError: this replica could not take over the published weights.
        """
        if (failure := self._engine.failure) is not None:
            raise failure
        if self._broken is not None:
            raise self._broken

    async def llm_config(self) -> LLMConfig:
        return self._llm_config

    async def __del__(self) -> None:
        """Called by Serve, once, when it stops the replica."""
        if getattr(self, "_engine", None) is None:
            return  # the launch failed, and left nothing
        if self._agent is not None:
            await self._agent.leave()
        with contextlib.suppress(asyncio.CancelledError):
            await self._app.stop()
        await asyncio.to_thread(self._engine.shutdown)

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Called by `build_llm_deployment`."""
        return deployment_options(llm_config)

    async def __serve_build_asgi_app__(self) -> Any:
        raise RuntimeError(
            "direct streaming (RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING) is refused: it goes around the ingress, which "
            "holds sessions to their replica and answers for every replica of the fleet; unset it"
        )


def _session_headers(session: Session) -> dict[str, str]:
    return {SESSION_ID: session.id, REOPENED_HEADER: str(session.reopened).lower()}


def _lost_with_its_engine(session_id: str, failure: Exception) -> tuple[Head, bytes]:
    return refusal(
        HTTPStatus.GONE,
        SessionGoneError.__name__,
        f"the engine of session {session_id!r} is dead and will be replaced ({failure}); open a new session, or repeat "
        f"the turn with its full history and the header 'x-session-history: full' once it was",
    )


def _to_its_rank(call: HttpCall, session: Session) -> HttpCall:
    """Have the engine route the request to the session's data-parallel rank, by the headers that SGLang reads."""
    if session.dp_rank is None:
        return call
    rank = str(session.dp_rank)
    return call.with_headers([("x-data-parallel-rank", rank), ("x-override-routed-dp-rank", rank)])


def _replica_id() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _metric_labels() -> dict[str, str]:
    from ray import serve

    replica = serve.get_replica_context().replica_id
    return {
        "application": replica.deployment_id.app_name,
        "deployment": replica.deployment_id.name,
        "replica": replica.unique_id,
    }


def _free_port() -> int:
    """A port that nobody has now; SGLang derives the ports of its internal sockets from it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
