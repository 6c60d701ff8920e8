"""The actors of the demo: started together, reached with deadlines, ended in every case.

The engine host and the trainer use no CPU of Ray's; the only CPU that is counted belongs to the
engine's rank.  Both are pinned to the driver's node, because the engine listens on loopback only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from engine import EngineConfig, EngineHost
from local_ray import RayGoneError, RaySession
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from records import RolloutBatch, SyncRecord, UpdateRecord
from tiny_model import ModelSize, write_model

if TYPE_CHECKING:
    from ray.actor import ActorHandle

START_TIMEOUT_SECONDS = 240.0
CALL_TIMEOUT_SECONDS = 240.0
STOP_TIMEOUT_SECONDS = 60.0
ENGINE_SEED_OFFSET = 1_000_003
"""The engine's checkpoint comes from another seed than the trainer's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    size: ModelSize
    seed: int
    device: str
    workdir: Path
    """Where the engine's checkpoint is written; on the driver's node."""


class RemoteTrainer:
    """A ``loop.Trainer`` over the trainer's actor: every call has a deadline and a name."""

    def __init__(self, actor: ActorHandle, session: RaySession) -> None:
        self._actor = actor
        self._session = session

    def connect(self, url: str, scheduler_actors: Sequence[ActorHandle]) -> None:
        self._call("connect", url, scheduler_actors, seconds=START_TIMEOUT_SECONDS)

    def sync(self, version: str) -> SyncRecord:
        return self._call("sync", version)

    def gap(self, batch: RolloutBatch) -> float:
        return self._call("gap", batch)

    def verify(self, batch: RolloutBatch) -> float:
        return self._call("verify", batch)

    def learn(self, batch: RolloutBatch, rewards: Sequence[float]) -> UpdateRecord:
        return self._call("learn", batch, rewards)

    def close(self) -> None:
        self._call("close", seconds=STOP_TIMEOUT_SECONDS)

    def _call(self, method: str, *values: Any, seconds: float = CALL_TIMEOUT_SECONDS) -> Any:
        call = getattr(self._actor, method).remote(*values)
        return self._session.wait_for(call, seconds=seconds, what=f"the trainer's {method}()")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A healthy engine and a trainer that is connected to it."""

    url: str
    trainer: RemoteTrainer


@contextmanager
def running_fleet(
    config: FleetConfig, session: RaySession, *, note: Callable[[str], None]
) -> Iterator[Fleet]:
    """Start both actors, connect them; on leaving, for whatever reason, end both."""
    with ExitStack() as cleanup:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        host = ray.remote(num_cpus=0)(EngineHost).options(scheduling_strategy=here).remote()
        cleanup.callback(session.kill, host)
        note("making the model and its tokenizer")
        seed = config.seed + ENGINE_SEED_OFFSET
        num_parameters = write_model(config.workdir, size=config.size, seed=seed)
        note(f"starting the engine and the trainer ({num_parameters / 1e6:.1f} M parameters)")
        starting = host.start.remote(
            EngineConfig(model_path=config.workdir, seed=config.seed, device=config.device)
        )
        cleanup.callback(_stop_engine, host, starting, session)
        actor = _start_trainer(config, here)
        cleanup.callback(session.kill, actor)
        address = session.wait_for(
            starting, seconds=START_TIMEOUT_SECONDS, what="the start of the engine"
        )
        note(f"engine ready at {address.url} ({len(address.scheduler_actors)} rank)")
        trainer = RemoteTrainer(actor, session)
        trainer.connect(address.url, address.scheduler_actors)
        session.remember_processes()
        note("trainer connected")
        yield Fleet(url=address.url, trainer=trainer)
        trainer.close()


def _start_trainer(config: FleetConfig, here: NodeAffinitySchedulingStrategy) -> ActorHandle:
    from trainer import PolicyTrainer, TrainerConfig  # torch: seconds that the engine starts in

    actor_class = ray.remote(num_cpus=0, enable_tensor_transport=True)(PolicyTrainer)
    return actor_class.options(scheduling_strategy=here).remote(
        TrainerConfig(size=config.size, seed=config.seed, device=config.device)
    )


def _stop_engine(host: ActorHandle, starting: ray.ObjectRef, session: RaySession) -> None:
    """Ask a host that has finished its start; one that is still in it is simply killed."""
    finished, _ = ray.wait([starting], timeout=0)
    if not finished or not session.is_alive():
        return
    stopping = host.stop.remote()
    # A host that is gone, alone or with its Ray, has taken its ranks along: what was asked for.
    with suppress(RayGoneError, ray.exceptions.ActorDiedError):
        session.wait_for(stopping, seconds=STOP_TIMEOUT_SECONDS, what="the end of the engine")
