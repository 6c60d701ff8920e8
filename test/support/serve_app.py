"""A Serve application for tests: two replicas of a tiny model behind Serve's HTTP proxy, one call to have it.

```python
with running_app(model_path) as app:           # or the session's own: the fixture `served`
    app.post("/pause", {"mode": "retract"})    # the raw answer
    app.openai().chat.completions.create(...)
```
Ray must be running, with one CPU for each replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import requests

from .engine import CALL_TIMEOUT_S, HOST, free_port
from .oracle import Generation, scored_request

MODEL = "tiny"
START_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedApp:
    """A running application. Every call has a deadline."""

    url: str
    name: str

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        """The raw answer, whatever its status."""
        options.setdefault("timeout", CALL_TIMEOUT_S)
        return requests.post(f"{self.url}{path}", json=body, **options)

    def get(self, path: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", CALL_TIMEOUT_S)
        return requests.get(f"{self.url}{path}", **options)

    def delete(self, path: str, **options: Any) -> requests.Response:
        return requests.delete(f"{self.url}{path}", timeout=CALL_TIMEOUT_S, **options)

    def openai(self, **options: Any) -> Any:
        from openai import OpenAI

        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=CALL_TIMEOUT_S
        ).with_options(**options)

    def generate(
        self,
        prompt: Sequence[int],
        length: int,
        *,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> Generation:
        """One greedy completion of exactly `length` tokens with its log-probabilities."""
        response = self.post("/generate", scored_request(prompt, length) | body, headers=headers)
        assert response.status_code == requests.codes.ok, response.text
        return dataclasses.replace(
            Generation.of_answer(response.json()), replica=response.headers["x-sglang-replica"]
        )

    def replicas(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.get("/replicas").json()["replicas"]
        return answer

    def fleet(self) -> Any:
        """Handle of the FleetControl deployment."""
        from ray import serve

        from sglang.srt.ray.serve.fleet import deployment_name

        return serve.get_deployment_handle(deployment_name(MODEL), self.name)

    def wait_for_replicas(self, number: int, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while sum(replica["serving"] for replica in self.replicas()) != number:
            assert time.monotonic() < deadline, (number, self.replicas())
            time.sleep(0.2)


def replica_ids(app: ServedApp) -> list[str]:
    """Of all that the fleet knows, in the order in which they joined."""
    return [str(replica["replica"]) for replica in app.replicas()]


def rank_pids(app: ServedApp, replica: str) -> list[int]:
    """Process ids of a replica's schedulers."""
    import os

    import ray

    ranks = app.fleet().ranks.remote(replica).result(timeout_s=30)
    return ray.get([rank.__ray_call__.remote(lambda _: os.getpid()) for rank in ranks], timeout=30)


def wait_until(reached: Callable[[], bool], timeout_s: float, what: Callable[[], Any]) -> None:
    """Poll; a deadline that passes says what there was instead."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def engine_kwargs(**changes: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 16384,
        "random_seed": 0,
        "log_level": "warning",
        "enable_rdt_weight_sync": True,
        "sleep_on_idle": True,
    } | changes


def llm_config(
    model_path: Path, *, replicas: int = 2, model_id: str = MODEL, **changes: Any
) -> Any:
    from ray.serve.llm import LLMConfig

    return LLMConfig(
        model_loading_config={"model_id": model_id, "model_source": str(model_path)},
        engine_kwargs=engine_kwargs(**changes.pop("engine", {})),
        deployment_config=changes.pop("deployment", {"num_replicas": replicas}),
        **(
            {"log_engine_metrics": False, "server_cls": "sglang.srt.ray.serve:SGLangServer"}
            | changes
        ),
    )


@contextlib.contextmanager
def running_app(config: Any, *, name: str = "app") -> Iterator[ServedApp]:
    """Deploy, wait until every replica serves, and take it down again."""
    from ray import serve

    from sglang.srt.ray.serve import build_app

    port = free_port()
    serve.start(http_options={"host": HOST, "port": port})
    try:
        serve.run(build_app(config), name=name, route_prefix="/", blocking=False)
        app = ServedApp(url=f"http://{HOST}:{port}", name=name)
        yield app
    finally:
        serve.shutdown()
