"""Reinforcement learning on Ray Serve: deploy, open sessions, stream multi-turn rollouts, sync, and learn.

The same policy, reward and proof as in ../rl_cpu, but the engine is a Serve deployment of two replicas: a
`WeightPublisher` pauses both, brings them to the new weights and resumes them as one transaction. Two CPUs are enough.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl_cpu"))

import ray
import requests
from fleet import ENGINE_SEED_OFFSET, RemoteTrainer
from local_ray import RaySession, ray_session
from loop import TrainingLoop
from report import LiveReport
from rich.console import Console
from rollout import BatchShape, TokenClass
from session_rollout import SessionRollout
from tiny_model import MODEL_SIZES, VOCAB_SIZE, write_model

HOST = "127.0.0.1"
SHARED = str(Path(__file__).resolve().parents[1] / "rl_cpu")
APP, MODEL = "rollout", "policy"


@contextmanager
def deployed(model_path: Path, *, replicas: int, seed: int) -> Iterator[str]:
    """The application's URL, once every replica serves; on leaving, all of it is taken down."""
    from ray import serve
    from ray.serve.llm import LLMConfig

    from sglang.srt.ray.serve import build_app

    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(model_path)},
        engine_kwargs={
            "device": "cpu",
            "dtype": "float32",
            "enable_rdt_weight_sync": True,
            "max_total_tokens": 16384,  # else the KV cache takes the machine's memory
            "random_seed": seed,
            "sleep_on_idle": True,
            "log_level": "warning",
        },
        deployment_config={"num_replicas": replicas},
        server_cls="sglang.srt.ray.serve:SGLangServer",
        log_engine_metrics=False,
    )
    port = _free_port()
    serve.start(http_options={"host": HOST, "port": port})
    try:
        serve.run(build_app(config), name=APP, route_prefix="/")
        yield f"http://{HOST}:{port}"
    finally:
        serve.shutdown()


def trainer_class() -> type:
    from trainer import PolicyTrainer

    class ServeTrainer(PolicyTrainer):
        """Publishes to every replica of the application."""

        def connect_serve(self, app: str, model: str) -> None:
            from sglang.srt.ray import WeightPublisher
            from sglang.srt.ray.serve import connect_replicas

            self.attach(WeightPublisher.connect(connect_replicas(app, model)))

    return ServeTrainer


def connected_trainer(session: RaySession, options: argparse.Namespace) -> RemoteTrainer:
    from trainer import TrainerConfig

    actor_class = ray.remote(num_cpus=0, enable_tensor_transport=True)(trainer_class())
    config = TrainerConfig(size=MODEL_SIZES["tiny"], seed=options.seed, device="cpu")
    actor = actor_class.remote(config)
    session.wait_for(
        actor.connect_serve.remote(APP, MODEL), seconds=240, what="the trainer's connection"
    )
    return RemoteTrainer(actor, session)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=30, help="policy updates")
    parser.add_argument("--replicas", type=int, default=2, help="each takes a CPU")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling")
    parser.add_argument("--verbose", action="store_true", help="show the actors' logs")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, report: Any) -> Any:
    """The whole run; returns what the loop reached and the replicas' own word on their versions."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl_serve_")))
        write_model(folder, size=MODEL_SIZES["tiny"], seed=options.seed + ENGINE_SEED_OFFSET)
        # Ray's workers, where the trainer lives, inherit it.
        paths = [SHARED, os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        session = stack.enter_context(ray_session(stream_logs=options.verbose))
        report.note("deploying")
        url = stack.enter_context(deployed(folder, replicas=options.replicas, seed=options.seed))
        report.note(f"{options.replicas} replicas serve at {url}")
        trainer = connected_trainer(session, options)
        shape = BatchShape(num_prompts=4)
        rollout = stack.enter_context(closing(SessionRollout(url, shape)))
        loop = TrainingLoop(
            rollout=rollout,
            trainer=trainer,
            listener=report,
            shape=shape,
            rewarded=TokenClass(),
            seed=options.seed,
        )
        with report:
            loop.run(options.steps)
        trainer.close()
        states = requests.get(f"{url}/weight_sync", timeout=60).json()["replicas"]
        versions = [each["state"]["version"] for each in states]
        report.note(
            f"replicas serve {versions!r}; {rollout.cached_tokens} prompt tokens came from session caches"
        )
        return loop.progress, versions, rollout.cached_tokens


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    report = LiveReport(Console(), num_steps=options.steps)
    progress, _, _ = run(options, report)
    report.evaluation(progress.evaluation, chance=TokenClass().chance(vocab_size=VOCAB_SIZE))
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
