"""Command line and course of a run; see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console

from . import model, plot, results
from .stream import TokenStream
from .trainer import WAYS, Trainer

WAIT_S = 300.0
WARM_UPS = 2


def run_of(
    arguments: argparse.Namespace, megabytes: float, tp: int, engines: int
) -> dict[str, Any]:
    """All ways with one model and one fleet."""
    from support.engine import ON_A_GPU, running_engine

    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    config = model.config_of(megabytes, arguments.tensors, dtype)
    options: dict[str, Any] = {"device": arguments.device, "dtype": dtype, "tp_size": tp}
    options |= ON_A_GPU if arguments.device == "cuda" else {"max_total_tokens": 2048}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        num_bytes = model.write(Path(folder), config, dtype)
        fleet = [
            stack.enter_context(running_engine(Path(folder), **options)) for _ in range(engines)
        ]
        trainer = ray.remote(num_cpus=0, enable_tensor_transport=True)(Trainer).remote(
            folder, arguments.device
        )
        connect = _on(trainer, "connect", [(engine.url, engine.actors) for engine in fleet], tp)
        for way in arguments.ways:
            for _ in range(WARM_UPS):
                _on(trainer, "step")
                _on(trainer, "sync", way)
            _check_arrival(trainer, fleet, way)
        rows, copies = _measure(arguments, trainer, fleet)
        _on(trainer, "close")
        ray.kill(trainer)
    ceilings = [each for row in copies.values() for each in row]
    return {
        "bytes": num_bytes,
        "tensors": model.tensors_of(config),
        "tp": tp,
        "engines": engines,
        "device": arguments.device,
        "connect": connect,
        "copy": statistics.median(each["copy"] for each in ceilings),
        "digest": statistics.median(each["digest"] for each in ceilings),
        "ways": {way: results.summary(rows[way], copies[way]) for way in arguments.ways},
    }


def _measure(
    arguments: argparse.Namespace, trainer: Any, fleet: list[Any]
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """The ways take turns: first without requests, then with a stream that feels the pause."""
    rows: dict[str, list[Any]] = {way: [] for way in arguments.ways}
    copies: dict[str, list[Any]] = {way: [] for way in arguments.ways}

    def once(way: str) -> dict[str, Any]:
        _on(trainer, "step")
        copies[way].append(_on(trainer, "ceiling"))
        rows[way].append(_on(trainer, "sync", way))
        return rows[way][-1]

    for _ in range(arguments.repeats):
        for way in arguments.ways:
            once(way)
    for _ in range(arguments.stream_repeats):
        for way in arguments.ways:
            with TokenStream(fleet[0].url) as stream:
                row = once(way)
                stream.wait_for_tokens(3)
                row["felt"] = stream.felt(*row["span"])
    return rows, copies


def _check_arrival(trainer: Any, fleet: list[Any], way: str) -> None:
    """Upstream's checker must find the trainer's weights in every engine, whatever the way claims."""
    expected = _on(trainer, "probe")
    for engine in fleet:
        response = engine.post("weights_checker", {"action": "checksum"})
        response.raise_for_status()
        found = response.json()["ranks"][0]["checksums"]
        wrong = [
            name
            for name, value in expected.items()
            if name == "model.norm.weight" and found[name] != value
        ]
        if wrong:
            raise RuntimeError(f"{way!r} left other weights in {engine.url!r}: {wrong!r}")


def _on(trainer: Any, method: str, *arguments: Any) -> Any:
    return ray.get(getattr(trainer, method).remote(*arguments), timeout=WAIT_S)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.weight_sync", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", type=float, nargs="+", default=[3, 750], help="MB")
    parser.add_argument("--tensors", type=int, default=147, help="about so many (12 a layer)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--engines", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=10, help="without requests")
    parser.add_argument("--stream-repeats", type=int, default=3, help="with a running stream")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG or SVG")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    # Ray's workers unpickle the trainer by the name of its module.
    root, paths = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, f"{root}/test", paths]))
    from support.local_ray import local_ray

    console, runs = Console(width=200), []
    with local_ray(num_cpus=max(arguments.tp) * max(arguments.engines)):
        for megabytes in arguments.sizes:
            for tp in arguments.tp:
                for engines in arguments.engines:
                    runs.append(run_of(arguments, megabytes, tp, engines))
                    console.print(results.table(runs[-1]))
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else "a CPU"
    about = {"machine": machine, "cores": os.cpu_count(), "torch": torch.__version__}
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**about, "ray": ray.__version__, "runs": runs}, indent=1)
        )
    if arguments.plot:
        plot.draw(runs, arguments.plot)


if __name__ == "__main__":
    main()
