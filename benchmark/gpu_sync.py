"""What a weight sync costs where trainer and engine share one GPU, beside copies of the same bytes and upstream's way.

A random Qwen2 (2.6 GB in bfloat16 by default) is served under Ray; an actor that holds other weights of the same shapes
publishes them again and again, each time with new values. In the same run the same bytes are copied on the device, and
sent with upstream's `update_weights_from_tensor` (CUDA IPC). Medians after warm-up, as a table and (--json) as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import requests
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))
from support.engine import ON_A_GPU, running_engine
from support.local_ray import local_ray
from support.models import tokenizer

SIZES = {"tiny": (256, 512, 2, 4), "2.6GB": (1536, 8960, 28, 24)}
"""Hidden size, intermediate size, layers, heads of 64."""
VOCABULARY = 512
WAIT_S = 300.0


def write_model(folder: Path, size: str, device: str) -> int:
    """Config, random weights and a tokenizer; returns the bytes of the weights."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, intermediate, layers, heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    torch.manual_seed(0)
    weights = {
        name: (torch.randn(t.shape, device=device) * 0.02).bfloat16().cpu()
        for name, t in shapes.items()
    }
    tokenizer().save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in weights.values())


class Trainer:
    """Holds the weights on the device and sends them."""

    def __init__(self, model: str, device: str) -> None:
        from safetensors.torch import load_file

        self.device = device
        loaded = load_file(f"{model}/model.safetensors")
        self.weights = {name: tensor.to(device) for name, tensor in loaded.items()}
        self.session = requests.Session()

    def connect(self, url: str, actors: list[Any], bucket_bytes: int | None) -> dict[str, Any]:
        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        self.url = url
        started = time.perf_counter()
        self.publisher = WeightPublisher.connect(
            [HttpEngineControl(url, actors)], bucket_bytes=bucket_bytes
        )
        (lane,) = self.publisher.lanes
        return {
            "seconds": time.perf_counter() - started,
            "lane": lane.loopback.chosen.lane,
            "loopback_gigabytes_per_second": lane.loopback.chosen.gigabytes_per_second,
            "gigabytes_per_second": lane.gigabytes_per_second,
            "warnings": list(lane.warnings),
        }

    def step(self, seed: int) -> None:
        """New values in the same memory, as an optimizer leaves them."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in self.weights.values():
            tensor.normal_(0.0, 0.02, generator=generator)
        self._settle()

    def sync(self, version: int) -> dict[str, Any]:
        started = time.perf_counter()
        report = self.publisher.sync(self.weights, version=str(version))
        return json.loads(report.to_json()) | {"caller_seconds": time.perf_counter() - started}

    def upstream(self) -> dict[str, float]:
        """The same weights by upstream's endpoint, in the session that it needs."""
        from sglang.srt.utils import MultiprocessingSerializer

        marks = [time.perf_counter()]
        named = list(self.weights.items())
        sent = MultiprocessingSerializer.serialize(named, output_str=True)
        marks.append(time.perf_counter())
        for path, body in (
            ("begin_weight_update", {}),
            ("update_weights_from_tensor", {"serialized_named_tensors": [sent]}),
            ("end_weight_update", {}),
        ):
            response = self.session.post(f"{self.url}/{path}", json=body, timeout=WAIT_S)
            if response.status_code != requests.codes.ok:
                raise RuntimeError(f"{path} answered {response.status_code}: {response.text[:400]}")
            marks.append(time.perf_counter())
        names = ("serialize", "begin", "update", "end")
        steps = {n: b - a for n, a, b in zip(names, marks, marks[1:], strict=False)}
        return steps | {"caller_seconds": marks[-1] - marks[0]}

    def copies(self, repeats: int) -> dict[str, float]:
        """Seconds of copying the same bytes on the device, and of digesting them."""
        from sglang.srt.ray.weight_sync.digest import algorithm_for, tensor_digest, tensor_digests

        sources = list(self.weights.values())
        targets = [torch.empty_like(tensor) for tensor in sources]
        flat = torch.cat([tensor.view(-1) for tensor in sources])
        other = torch.empty_like(flat)
        algorithm = algorithm_for([self.device])
        calls: dict[str, Callable[[], Any]] = {
            "one flat copy": lambda: other.copy_(flat),
            "foreach copy": lambda: torch._foreach_copy_(targets, sources),
            "loop of copies": lambda: [a.copy_(b) for a, b in zip(targets, sources, strict=True)],
            "one flat read (sum)": lambda: flat.view(torch.int64).sum(),
            "digests, tensor by tensor": lambda: [tensor_digest(t, algorithm) for t in sources],
            "digests, all at once": lambda: tensor_digests(sources, algorithm),
            "digest of one flat tensor": lambda: tensor_digest(flat, algorithm),
        }
        return {name: self._median(call, repeats) for name, call in calls.items()}

    def _median(self, call: Callable[[], Any], repeats: int) -> float:
        seconds = []
        for _ in range(repeats + 2):
            self._settle()
            started = time.perf_counter()
            call()
            self._settle()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[2:])

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure(
    size: str, device: str, syncs: int, bucket_bytes: int | None, folder: Path
) -> dict[str, Any]:
    num_bytes = write_model(folder, size, device)
    result: dict[str, Any] = {"model": size, "bytes": num_bytes, "device": device, "syncs": syncs}
    trainer = ray.remote(num_cpus=0, enable_tensor_transport=True)(Trainer).remote(
        str(folder), device
    )

    def on_trainer(method: str, *arguments: Any) -> Any:
        return ray.get(getattr(trainer, method).remote(*arguments), timeout=WAIT_S)

    started = time.perf_counter()
    options = {"device": device, "dtype": "bfloat16"} | (ON_A_GPU if device == "cuda" else {})
    with running_engine(folder, **options) as engine:
        result["engine_ready_seconds"] = time.perf_counter() - started
        result["connect"] = on_trainer("connect", engine.url, engine.actors, bucket_bytes)
        reports = []
        for version in range(1, syncs + 3):
            on_trainer("step", version)
            reports.append(on_trainer("sync", version))
        result |= summary(reports)
        result["copies"] = on_trainer("copies", syncs)
        try:
            result["upstream"] = medians([on_trainer("upstream") for _ in range(syncs + 2)][2:])
        except ray.exceptions.RayTaskError as error:  # said in the result: the rest stands
            result["upstream_failed"] = str(error)[-1500:]
    return result


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all syncs but the first two; the first one, which plans and connects, by itself."""
    timed = reports[2:]
    keys = ("caller_seconds", "pause_seconds", "wire_gigabytes_per_second")
    return {key: statistics.median(report[key] for report in timed) for key in keys} | {
        "first_sync": reports[0],
        "phases": medians([report["phase_seconds"] for report in timed]),
        "verified": all(report["verified"] for report in reports),
    }


def show(result: dict[str, Any], console: Console) -> None:
    gigabytes = result["bytes"] / 1e9
    table = Table(title=f"{gigabytes:.2f} GB on {result['machine']}, medians of {result['syncs']}")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_column("GB/s", justify="right")

    def row(name: str, seconds: float) -> None:
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{gigabytes / seconds:.0f}" if seconds else "")

    row("whole sync, at the caller", result["caller_seconds"])
    row("generation paused", result["pause_seconds"])
    for name, seconds in result["phases"].items():
        row(f"  {name}", seconds)
    row("first sync", result["first_sync"]["caller_seconds"])
    row("connect", result["connect"]["seconds"])
    for name, seconds in result["copies"].items():
        row(name, seconds)
    for name, seconds in result.get("upstream", {}).items():
        row(f"upstream: {name}", seconds)
    console.print(table)
    console.print(result["connect"])
    if "upstream_failed" in result:
        console.print("upstream's update_weights_from_tensor failed:", result["upstream_failed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(SIZES), default="2.6GB")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--bucket-megabytes", type=int, help="the publisher's choice when left out")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    with local_ray(num_cpus=4), tempfile.TemporaryDirectory() as folder:
        megabytes = arguments.bucket_megabytes
        result = measure(
            arguments.model,
            arguments.device,
            arguments.syncs,
            None if megabytes is None else megabytes << 20,
            Path(folder),
        )
    result["torch"], result["ray"] = torch.__version__, ray.__version__
    result["machine"] = torch.cuda.get_device_name() if arguments.device == "cuda" else "a CPU"
    show(result, Console(width=110))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
