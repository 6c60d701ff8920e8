"""No snippet of the documentation goes unlooked at: each is executed by a named test, or here is why it is not.

A new block in README, CONTRIBUTING or docs/ fails this test until it stands in the table.
"""

# ruff: noqa: E501  (the first lines of snippets, word for word)

from __future__ import annotations

import ast
from pathlib import Path

from snippets import ROOT, all_snippets

HERE = "test/docs/test_snippets_run.py::"
SERVE = "test/serve/test_serve_docs.py::"
TRAINERS = "test/weight_sync/test_trainer_examples.py::"
EXECUTED = {
    ("README.md", "make demo"): "test/examples/test_rl_cpu_demo.py::test_twelve_steps_prove_every_sync_and_raise_the_reward",
    ("docs/quickstart.md", "make demo"): "test/examples/test_rl_cpu_demo.py::test_twelve_steps_prove_every_sync_and_raise_the_reward",
    ("README.md", "pip install '.[ray]'"): "test/ray_backend/test_launch_server.py::test_it_serves_the_openai_endpoints_and_sigterm_leaves_nothing",
    ("docs/quickstart.md", "pip install '.[ray]'"): "test/ray_backend/test_launch_server.py::test_it_serves_the_openai_endpoints_and_sigterm_leaves_nothing",
    ("README.md", "from sglang.srt.ray.http_server import launch_engine, serve_http"): HERE + "test_launching",
    ("docs/launching.md", "from sglang.srt.ray import launch_engine, serve_http"): HERE + "test_launching",
    ("docs/launching.md", "from sglang.srt.ray import get_scheduler_actor_name"): HERE + "test_launching",
    ("README.md", "from sglang.srt.ray import HttpEngineControl, WeightPublisher"): HERE + "test_publishing",
    ("docs/quickstart.md", "from sglang.srt.ray import HttpEngineControl, WeightPublisher"): HERE + "test_publishing",
    ("docs/weight-sync.md", "from sglang.srt.ray import HttpEngineControl, WeightPublisher"): HERE + "test_publishing",
    ("docs/trainers.md", "publisher = WeightPublisher.connect([HttpEngineControl(url, actors) for url, actors in fleet])"): HERE + "test_publishing",
    ("docs/trainers.md", '--8<-- "examples/trainers/plain_pytorch.py"'): TRAINERS + "test_plain_pytorch",
    ("docs/trainers.md", '--8<-- "examples/trainers/fsdp_rows.py"'): TRAINERS + "test_fsdp_rows",
    ("docs/trainers.md", '--8<-- "examples/trainers/megatron_tp.py"'): TRAINERS + "test_megatron_tp",
    ("docs/weight-sync.md", 'ref = ray.put([view0, view1], _tensor_transport="nixl")'): HERE + "test_a_clients_own_pull",
    ("docs/weight-sync.md", "python -m sglang.srt.ray.weight_sync.top http://HOST:PORT [more engines]"): HERE + "test_watching",
    ("docs/quickstart.md", "python -m sglang.srt.ray.weight_sync.top http://127.0.0.1:30000"): HERE + "test_watching",
    ("docs/operations.md", "curl http://HOST:PORT/update_weights_from_disk -H 'Content-Type: application/json' -d '{\"model_path\": \"PATH\", \"weight_version\": \"from-disk\"}'"): HERE + "test_reloading_from_disk",
    ("docs/operations.md", "python -m sglang.srt.ray.doctor"): "test/ray_backend/test_doctor.py::test_the_report_of_this_machine_is_as_the_page_shows_it",
    ("docs/operations.md", "ok    version        sglang 0.5.23+rdt.1"): "test/ray_backend/test_doctor.py::test_the_report_of_this_machine_is_as_the_page_shows_it",
    ("docs/who-holds-what.md", 'curl "http://HOST:PORT/parallelism_config?rank=R"'): HERE + "test_where_a_rank_stands",
    ("docs/who-holds-what.md", "from sglang.srt.distributed.parallel_state import ParallelismContext, RankParallelismConfig"): HERE + "test_building_a_shard_and_mapping_names",
    ("docs/who-holds-what.md", "mapper = ParameterMapper.from_model(shard)"): HERE + "test_building_a_shard_and_mapping_names",
    ("docs/patches.md", "scripts/fork tree"): "test/packaging/test_fork_tree.py::test_a_commit_becomes_a_patch_named_by_its_subject",
    ("docs/patches.md", "git -C build/tree commit -a --fixup COMMIT"): HERE + "test_folding_a_commit_into_a_patch",
    ("docs/patches.md", "ray: mix the weight verbs into the scheduler actor"): "test/packaging/test_fork_tree.py::test_a_commit_becomes_a_patch_named_by_its_subject",
    ("docs/serve.md", 'SESSION=$(curl -s -X POST $URL/sessions | python3 -c \'import json, sys; print(json.load(sys.stdin)["session_id"])\')'): SERVE + "test_the_curl_lines_of_the_page_answer_as_it_says",
    ("docs/serve.md", 'curl -X POST $URL/abort_request -H \'content-type: application/json\' -d \'{"rid": ["mine", "r-1"]}\''): SERVE + "test_the_curl_lines_of_the_page_answer_as_it_says",
    ("docs/serve.md", 'curl -X POST $URL/flush_cache'): SERVE + "test_the_curl_lines_of_the_page_answer_as_it_says",
    ("docs/serve.md", 'curl -X POST $URL/pause -H \'content-type: application/json\' -d \'{"mode": "retract", "deadline_s": 30}\''): SERVE + "test_the_curl_lines_of_the_page_answer_as_it_says",
    ("docs/serve.md", 'curl -X POST $URL/sleep -H \'content-type: application/json\' -d \'{"tags": ["kv_cache"]}\''): SERVE + "test_the_curl_lines_of_the_page_answer_as_it_says",
    ("docs/serve.md", 'curl -X POST $URL/v1/chat/completions -H \'content-type: application/json\' -d \'{"model": "tiny", "messages": [{"role": "user", "content": "bada"}], "max_tokens": 4}\''): SERVE + "test_the_curl_lines_of_the_page_answer_as_it_says",
    ("docs/serve.md", "python examples/rl_serve/main.py --steps 30"): "test/serve/test_rl_serve_example.py::test_it_learns_over_sessions_and_ends_clean",
    ("docs/serve.md", "from ray import serve"): SERVE + "test_the_deploying_snippet_builds_an_application",
    ("docs/serve.md", "from sglang.srt.ray import WeightPublisher"): SERVE + "test_the_publishing_snippet_syncs_every_replica",
}  # fmt: skip
NOT_EXECUTED = {
    ("docs/serve.md", "client -- HTTP --> Serve's proxy --> SGLangIngress --+-- one replica, by Serve's hash of the session --> SGLangServer"): "a diagram",
    ("docs/serve.md", '{"verb": "pause", "status": "partial",'): "an answer; test/serve/test_control.py has real ones",
    ("docs/serve.md", '{"requests": {"mine": {"found": true, "stage": "running", "ended": true, "replica": "x1"}}}'): "an answer; test/serve/test_aborts.py has real ones",
    ("README.md", "step   1/40  version 1   reward 0.130  loss +0.005    710 tok/s  gap 9.5e-07  sync 1089.0 ms, 5.8 MB (plan 724.7 wire 102.9 ...)"): "what the demo printed",
    ("CONTRIBUTING.md", "make setup"): "installs 11 GB; each of its phases is tested in test/packaging/test_provision.py",
    ("CONTRIBUTING.md", 'make test ARGS="test/weight_sync/test_layout.py -x"'): "is what runs this very test",
    ("docs/launching.md", "placement_group=pg          keyword of launch_engine and RayEngine"): "a diagram; test/topology/test_group_choice.py",
    ("docs/upgrading.md", "pip download --no-deps sglang==NEW -d /tmp/new"): "needs an upstream newer than the pinned one; `try` itself: test_try_rebases_the_series_onto_a_moved_upstream",
    ("docs/upgrading.md", "git -C build/try add -A && git -C build/try -c core.editor=true rebase --continue"): "needs a conflict solved by hand; where one is found: test_try_says_where_the_series_conflicts",
    ("docs/launching.md", "your actor (node A)                     node A                   node B"): "a diagram",
    ("docs/serve.md", "make release-test"): "a quarter of an hour; its short form: test/serve/test_release_short.py",
    ("docs/benchmarks.md", "python benchmark/two_gpus.py --json two_gpus.json"): "needs two GPUs",
}  # fmt: skip
LINES_NOT_EXECUTED = {
    "pip install '.[ray]'": "downloads 11 GB; of the wheel alone: test_the_real_wheel_installs_and_leaves_nothing",
    "python -m sglang.launch_server --ray --enable-rdt-weight-sync --model-path M          # on GPUs": "needs a GPU",
    "make test      # the test suite": "is what runs this very test",
}


def test_lines_that_are_left_out_of_an_executed_snippet_are_still_there() -> None:
    every = {
        line
        for snippets in all_snippets().values()
        for one in snippets
        for line in one.body.splitlines()
    }
    assert set(LINES_NOT_EXECUTED) <= every


def test_every_snippet_is_accounted_for() -> None:
    there, known = set(all_snippets()), {*EXECUTED, *NOT_EXECUTED}
    assert not there - known, f"say who executes these: {sorted(there - known)!r}"
    assert not known - there, f"these are no longer in the documentation: {sorted(known - there)!r}"
    twice = [key for key, snippets in all_snippets().items() if len(snippets) > 1]
    assert not twice, f"two blocks begin alike, so neither can be told: {twice!r}"


def test_every_named_test_exists() -> None:
    for node in set(EXECUTED.values()):
        path, _, name = node.partition("::")
        functions = {
            item.name
            for item in ast.parse(Path(ROOT, path).read_text()).body
            if isinstance(item, ast.FunctionDef)
        }
        assert name in functions, f"{node} does not exist"
