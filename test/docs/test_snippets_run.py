"""The snippets of the documentation, executed word for word; only the names that they leave open are given to them."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from snippets import body
from support.engine import RunningEngine, free_port, wait_until_healthy
from support.fused import fused_state
from support.models import new_model
from support.oracle import assert_serves

PROMPT = [5, 6, 7, 8, 9]
WAIT_S = 180
PUBLISH = "from sglang.srt.ray import HttpEngineControl, WeightPublisher"


class Reader:
    """A person who pastes snippets, one after the other, into a process of their own."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def run(self, code: str, prelude: str, names: dict[str, Any]) -> None:
        self._held |= names
        exec(prelude, self._held)
        exec(code, self._held)

    def ask(self, expression: str) -> Any:
        return eval(expression, self._held)


@contextlib.contextmanager
def reader(**options: Any) -> Iterator[Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor = ray.remote(num_cpus=0, enable_tensor_transport=True, **options)(Reader).remote()
    try:
        yield actor
    finally:
        ray.kill(actor)


def shell(command: str, engine: RunningEngine, **words: str) -> str:
    command = command.replace("http://HOST:PORT", engine.url)
    for word, value in words.items():
        command = command.replace(word, value)
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SNIPPETS_THAT_PUBLISH = {
    "README.md": PUBLISH,
    "docs/quickstart.md": PUBLISH,
    "docs/weight-sync.md": PUBLISH,
    "docs/trainers.md": "publisher = WeightPublisher.connect("
    "[HttpEngineControl(url, actors) for url, actors in fleet])",
}


def test_publishing(shared_engine: RunningEngine) -> None:
    engine = (shared_engine.url, shared_engine.actors)
    for seed, (page, first_line) in enumerate(SNIPPETS_THAT_PUBLISH.items(), 40):
        code = body(page, first_line).replace('version="7"', "version=str(step)")
        model = new_model(seed)
        names = {
            "url": engine[0], "actors": engine[1], "fleet": [engine], "step": f"snippet-{seed}", "model": model,
            "named_tensors": model.state_dict().items(),
        }  # fmt: skip
        prelude = "" if PUBLISH in code else PUBLISH
        with reader() as actor:
            ray.get(actor.run.remote(code, prelude, names), timeout=WAIT_S)
            assert ray.get(actor.ask.remote("report.verified"), timeout=WAIT_S), page
            ray.get(actor.ask.remote("publisher.close()"), timeout=WAIT_S)
        answer = shared_engine.generate(PROMPT, 6)
        assert answer.version == f"snippet-{seed}", page
        assert_serves(model, PROMPT, answer)


def test_a_clients_own_pull(shared_engine: RunningEngine) -> None:
    code = body("docs/weight-sync.md", 'ref = ray.put([view0, view1], _tensor_transport="nixl")')
    state = fused_state(new_model(50).state_dict())
    first, second = "model.norm.weight", "lm_head.weight"
    names = {
        "name0": first, "name1": second, "view0": state[first], "view1": state[second], "actors": shared_engine.actors,
    }  # fmt: skip
    before = shared_engine.post("weights_checker", {"action": "checksum"}).json()
    with reader() as actor:
        for path in ("pause_generation", "begin_weight_update"):
            shared_engine.post(path, {}).raise_for_status()
        ray.get(actor.run.remote(code, "import ray", names), timeout=WAIT_S)
        for path in ("end_weight_update", "continue_generation"):
            shared_engine.post(path, {}).raise_for_status()
    after = shared_engine.post("weights_checker", {"action": "checksum"}).json()
    was, now = (told["ranks"][0]["checksums"] for told in (before, after))
    assert {name for name in was if was[name] != now[name]} == {first, second}


def test_watching(shared_engine: RunningEngine) -> None:
    top = "python -m sglang.srt.ray.weight_sync.top"
    for page, addresses in (
        ("docs/weight-sync.md", "http://HOST:PORT [more engines]"),
        ("docs/quickstart.md", "http://127.0.0.1:30000"),
    ):
        command = body(page, f"{top} {addresses}").partition("#")[0]
        command = command.replace(" [more engines]", "").strip()
        command = command.replace("http://127.0.0.1:30000", "http://HOST:PORT")
        command = command.replace("python", shlex.quote(sys.executable), 1)
        assert "SERVING" in shell(f"{command} --once", shared_engine)


def test_reloading_from_disk(shared_engine: RunningEngine, tiny_model: Path) -> None:
    """The cure for TORN without a trainer: afterwards it serves the checkpoint, under the label that was given."""
    (first_line,) = [
        line for line in _lines("docs/operations.md") if "update_weights_from_disk -H" in line
    ]
    shell(body("docs/operations.md", first_line), shared_engine, PATH=str(tiny_model))
    answer = shared_engine.generate(PROMPT, 6)
    assert answer.version == "from-disk"
    assert_serves(new_model(0), PROMPT, answer)


def _lines(page: str) -> list[str]:
    from snippets import all_snippets

    return [first_line for where, first_line in all_snippets() if where == page]


def test_where_a_rank_stands(shared_engine: RunningEngine) -> None:
    command, shown = body(
        "docs/who-holds-what.md", 'curl "http://HOST:PORT/parallelism_config?rank=R"'
    ).splitlines()
    told = json.loads(shell(command, shared_engine, **{"rank=R": "rank=0"}))
    fields = json.loads(shown.replace(", ...}", "}"))
    assert set(fields) <= set(told)
    assert (told["tp_size"], told["tp_rank"]) == (1, 0)


def test_building_a_shard_and_mapping_names(shared_engine: RunningEngine) -> None:
    """In a process of its own, as a trainer would: it publishes the engine's arguments for the whole process."""
    page = "docs/who-holds-what.md"
    build = body(
        page,
        "from sglang.srt.distributed.parallel_state import ParallelismContext, RankParallelismConfig",
    )
    mapping, comment = body(page, "mapper = ParameterMapper.from_model(shard)").split("# ")
    shown = mapping.rstrip().splitlines()[-1]
    prelude = (
        "import msgspec, requests\n"
        "from sglang.srt.configs.device_config import DeviceConfig\n"
        "from sglang.srt.configs.load_config import LoadConfig\n"
        "from sglang.srt.configs.model_config import ModelConfig\n"
        "from sglang.srt.model_loader import get_model\n"
        "from sglang.srt.model_loader.parameter_mapper import ParameterMapper\n"
        f"url, rank, named_tensors = {shared_engine.url!r}, 0, []\n"
    )
    after = (
        "import json\n"
        "shapes = {name: list(p.shape) for name, p in shard.named_parameters()}\n"
        f"print('TOLD', json.dumps([shapes, repr({shown})]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + build + mapping + after], capture_output=True, text=True, timeout=WAIT_S
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    shapes, mapped = json.loads(line.removeprefix("TOLD "))
    assert mapped == comment.strip().replace('"', "'")
    expected = fused_state(new_model(0).state_dict())
    assert shapes == {name: list(tensor.shape) for name, tensor in expected.items()}


def test_folding_a_commit_into_a_patch(tmp_path: Path) -> None:
    """On build/tree's commands alone: a repository with a commit a patch, as build/tree is."""
    block = body("docs/patches.md", "git -C build/tree commit -a --fixup COMMIT")
    commands = [line for line in block.splitlines() if line.startswith("git ")]
    tree = tmp_path / "build" / "tree"
    tree.mkdir(parents=True)
    setup = (
        "git init -q; git config user.name A; git config user.email a@example.invalid; echo 1 > f; git add f; "
        "git commit -qm upstream; git tag upstream; echo 2 > f; git commit -qam 'ray: a seam'; "
        "echo 3 > g; git add g; git commit -qm 'args: another'; echo 22 > f"
    )
    subprocess.run(["bash", "-ec", setup], cwd=tree, check=True)
    script = "\n".join(commands).replace("COMMIT", "HEAD~1")
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True)
    log = ["git", "-C", str(tree), "log", "--format=%s", "upstream..HEAD"]
    subjects = subprocess.run(log, capture_output=True, text=True, check=True).stdout.splitlines()
    assert subjects == ["args: another", "ray: a seam"]
    show = ["git", "-C", str(tree), "show", "HEAD~1:f"]
    assert subprocess.run(show, capture_output=True, text=True, check=True).stdout == "22\n"


@pytest.mark.slow
def test_launching(ray_address: str, tiny_model: Path) -> None:
    """README's and the launching page's, one after the other in one group of the reader's."""
    readme = body("README.md", "from sglang.srt.ray.http_server import launch_engine, serve_http")
    page = body("docs/launching.md", "from sglang.srt.ray import launch_engine, serve_http")
    naming = body("docs/launching.md", "from sglang.srt.ray import get_scheduler_actor_name")
    serving, _ = page.rsplit("engine.shutdown()", 1)
    group = ray.util.placement_group([{"CPU": 1}])
    for code, variable in ((readme, "group"), (serving, "pg")):
        port = free_port()
        prelude = (
            "import threading, ray\n"
            "from sglang.srt.server_args import ServerArgs\n"
            f"server_args = ServerArgs(model_path={str(tiny_model)!r}, device='cpu', dtype='float32', port={port}, "
            "max_total_tokens=4096, enable_rdt_weight_sync=True, sleep_on_idle=True, log_level='warning', "
            "ray_namespace='my-engines')\n"
        )
        with reader() as actor:
            ray.get(actor.run.remote(code, prelude, {variable: group}), timeout=300)
            wait_until_healthy(f"http://127.0.0.1:{port}", timeout_s=120)
            assert ray.get(actor.ask.remote("len(engine.scheduler_actors)"), timeout=60) == 1
            if variable == "pg":
                first = naming.replace("tp_rank=1, bundle_index=3", "tp_rank=0, bundle_index=0")
                assert first != naming, "the page names another rank now"
                names = {"ip_of_rank_0": ray.util.get_node_ip_address()}
                ray.get(actor.run.remote(first, "", names), timeout=60)
                assert ray.get(actor.ask.remote("actor == engine.scheduler_actors[0]"), timeout=60)
            ray.get(actor.ask.remote("engine.shutdown()"), timeout=120)
    ray.util.remove_placement_group(group)
