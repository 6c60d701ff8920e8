"""Upstream's own ways to send weights, as a trainer uses them: pause, begin, update, end, continue, over HTTP.

None of them compares what arrived with what was sent; the reports say `verified` false.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import requests
import torch

WAIT_S = 300.0
_GROUP = "benchmark"


class UpstreamWays:
    """One trainer's weights to engines by upstream's endpoints. Each way returns seconds by step."""

    def __init__(self, urls: Sequence[str], weights: dict[str, torch.Tensor], tp_size: int) -> None:
        self._urls = list(urls)
        self._weights = weights
        self._tp_size = tp_size
        self._sessions = [requests.Session() for _ in urls]
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=len(urls))
        self._group: Any = None
        self._folder = Path(tempfile.mkdtemp(prefix="weight-sync-", dir="/dev/shm"))

    def tensor(self, version: str) -> dict[str, float]:
        """`update_weights_from_tensor`: through shared memory (CUDA IPC on a GPU)."""
        from sglang.srt.utils import MultiprocessingSerializer

        def update() -> None:
            sent = MultiprocessingSerializer.serialize(list(self._weights.items()), output_str=True)
            body = {"serialized_named_tensors": [sent] * self._tp_size, "weight_version": version}
            self._post_all("update_weights_from_tensor", body)

        return self._in_a_session(update)

    def distributed(self, version: str) -> dict[str, float]:
        """`update_weights_from_distributed`: a broadcast to every rank (gloo on a CPU, NCCL on a GPU)."""
        if self._group is None:
            self._join()

        def update() -> None:
            body = {
                "names": list(self._weights),
                "dtypes": [str(t.dtype).removeprefix("torch.") for t in self._weights.values()],
                "shapes": [list(t.shape) for t in self._weights.values()],
                "group_name": _GROUP,
                "weight_version": version,
            }
            receiving = threading.Thread(
                target=self._post_all, args=("update_weights_from_distributed", body)
            )
            receiving.start()
            for tensor in self._weights.values():
                torch.distributed.broadcast(tensor, src=0, group=self._group)
            receiving.join()

        return self._in_a_session(update)

    def disk(self, version: str) -> dict[str, float]:
        """`update_weights_from_disk`: saved to and loaded from /dev/shm."""
        from safetensors.torch import save_file

        model = Path(self._folder)
        started = time.perf_counter()
        save_file(self._weights, model / "model.safetensors", metadata={"format": "pt"})
        steps = {"save": time.perf_counter() - started}
        self._step(steps, "pause", lambda: self._post_all("pause_generation", {"mode": "retract"}))
        body = {"model_path": str(model), "weight_version": version}
        self._step(steps, "update", lambda: self._post_all("update_weights_from_disk", body))
        self._step(steps, "continue", lambda: self._post_all("continue_generation", {}))
        return steps

    def prepare_disk(self, model_path: str) -> None:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(model_path) / name, self._folder)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _in_a_session(self, update: Callable[[], None]) -> dict[str, float]:
        steps: dict[str, float] = {}
        self._step(steps, "pause", lambda: self._post_all("pause_generation", {"mode": "retract"}))
        self._step(steps, "begin", lambda: self._post_all("begin_weight_update", {}))
        self._step(steps, "update", update)
        self._step(steps, "end", lambda: self._post_all("end_weight_update", {}))
        self._step(steps, "continue", lambda: self._post_all("continue_generation", {}))
        return steps

    def _step(self, steps: dict[str, float], name: str, call: Callable[[], None]) -> None:
        started = time.perf_counter()
        call()
        steps[name] = time.perf_counter() - started

    def _post_all(self, path: str, body: dict[str, Any]) -> None:
        list(self._pool.map(lambda index: self._post(index, path, body), range(len(self._urls))))

    def _post(self, index: int, path: str, body: dict[str, Any]) -> None:
        answer = self._sessions[index].post(
            f"{self._urls[index]}/{path}", json=body, timeout=WAIT_S
        )
        if answer.status_code != requests.codes.ok:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:400]}")

    def _join(self) -> None:
        from support.engine import HOST, free_port

        from sglang.srt.utils import init_custom_process_group

        on_cpu = next(iter(self._weights.values())).device.type == "cpu"
        place = {
            "master_address": HOST,
            "master_port": free_port(),
            "world_size": 1 + len(self._urls) * self._tp_size,
            "group_name": _GROUP,
            "backend": "gloo" if on_cpu else "nccl",
        }
        joining = [
            self._pool.submit(
                self._post,
                index,
                "init_weights_update_group",
                place | {"rank_offset": 1 + index * self._tp_size},
            )
            for index in range(len(self._urls))
        ]
        self._group = init_custom_process_group(
            backend=place["backend"],
            init_method=f"tcp://{HOST}:{place['master_port']}",
            world_size=place["world_size"],
            rank=0,
            group_name=_GROUP,
        )
        for each in joining:
            each.result()
