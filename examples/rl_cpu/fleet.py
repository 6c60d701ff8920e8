"""The actors of the demo: started together, reached with deadlines, ended in every case.

The engine host and the trainer use no CPU of Ray's; the only CPU that is counted belongs to the
engine's rank.  Both are pinned to the driver's node, because the engine listens on loopback only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from engine import EngineConfig, EngineHost
from local_ray import wait_for
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

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    def connect(self, url: str, scheduler_actors: Sequence[ActorHandle]) -> None:
        call = self._actor.connect.remote(url, scheduler_actors)
        wait_for(call, seconds=START_TIMEOUT_SECONDS, what="the trainer's connection to the engine")

    def sync(self, version: str) -> SyncRecord:
        call = self._actor.sync.remote(version)
        return wait_for(call, seconds=CALL_TIMEOUT_SECONDS, what=f"the sync of {version!r}")

    def gap(self, batch: RolloutBatch) -> float:
        call = self._actor.gap.remote(batch)
        return wait_for(call, seconds=CALL_TIMEOUT_SECONDS, what="the trainer's forward")

    def verify(self, batch: RolloutBatch) -> float:
        call = self._actor.verify.remote(batch)
        return wait_for(call, seconds=CALL_TIMEOUT_SECONDS, what="the trainer's verification")

    def learn(self, batch: RolloutBatch, rewards: Sequence[float]) -> UpdateRecord:
        call = self._actor.learn.remote(batch, rewards)
        return wait_for(call, seconds=CALL_TIMEOUT_SECONDS, what="the policy update")

    def close(self) -> None:
        call = self._actor.close.remote()
        wait_for(call, seconds=STOP_TIMEOUT_SECONDS, what="the end of the publisher")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A healthy engine and a trainer that is connected to it."""

    url: str
    trainer: RemoteTrainer


@contextmanager
def running_fleet(config: FleetConfig, *, note: Callable[[str], None]) -> Iterator[Fleet]:
    """Start both actors, connect them; on leaving, for whatever reason, end both."""
    with ExitStack() as cleanup:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        host = ray.remote(num_cpus=0)(EngineHost).options(scheduling_strategy=here).remote()
        cleanup.callback(ray.kill, host)
        note("making the model and its tokenizer")
        num_parameters = write_model(
            config.workdir, size=config.size, seed=config.seed + ENGINE_SEED_OFFSET
        )
        note(f"starting the engine and the trainer ({num_parameters / 1e6:.1f} M parameters)")
        starting = host.start.remote(
            EngineConfig(model_path=config.workdir, seed=config.seed, device=config.device)
        )
        cleanup.callback(_stop_engine, host, starting)
        actor = _start_trainer(config, here)
        cleanup.callback(ray.kill, actor)
        address = wait_for(starting, seconds=START_TIMEOUT_SECONDS, what="the start of the engine")
        note(f"engine ready at {address.url} ({len(address.scheduler_actors)} rank)")
        trainer = RemoteTrainer(actor)
        trainer.connect(address.url, address.scheduler_actors)
        note("trainer connected")
        yield Fleet(url=address.url, trainer=trainer)
        trainer.close()


def _start_trainer(config: FleetConfig, here: NodeAffinitySchedulingStrategy) -> ActorHandle:
    from trainer import PolicyTrainer, TrainerConfig  # torch: seconds that the engine starts in

    actor_class = ray.remote(num_cpus=0, enable_tensor_transport=True)(PolicyTrainer)
    return actor_class.options(scheduling_strategy=here).remote(
        TrainerConfig(size=config.size, seed=config.seed, device=config.device)
    )


def _stop_engine(host: ActorHandle, starting: ray.ObjectRef) -> None:
    """Ask a host that has finished its start; one that is still in it is simply killed."""
    finished, _ = ray.wait([starting], timeout=0)
    if finished:
        wait_for(host.stop.remote(), seconds=STOP_TIMEOUT_SECONDS, what="the end of the engine")
