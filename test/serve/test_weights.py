"""A `WeightPublisher` brings both replicas to a version through Serve; outputs are checked against Hugging Face's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import ray
import requests
from support.models import new_model
from support.oracle import assert_serves
from support.serve_app import MODEL, ServedApp

PROMPT = [5, 6, 7, 8]


def sync(trainer: Any, seed: int, version: str, **options: Any) -> Any:
    return ray.get(trainer.sync.remote(seed, version, **options), timeout=120)


def answers_of_both(served: ServedApp, length: int = 4) -> dict[str, Any]:
    """One answer of each replica, by its id."""
    answers: dict[str, Any] = {}
    for _ in range(40):
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": length, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
        }
        response = served.post("/generate", body)
        answers[response.headers["x-sglang-replica"]] = response.json()
        if len(answers) == 2:
            return answers
    raise AssertionError(f"40 requests reached only {sorted(answers)}")


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_both_replicas_serve_the_new_weights_and_say_so(
    served: ServedApp, trainer: Any, versions: Any, pause: str
) -> None:
    number = versions.next()
    report = sync(trainer, number, str(number), pause=pause)
    assert report.verified
    assert len(report.ranks) == 2
    for answer in answers_of_both(served).values():
        assert answer["meta_info"]["weight_version"] == str(number)
    for _ in range(4):
        assert_serves(new_model(number), PROMPT, served.generate(PROMPT, 4))
    status = served.get("/weight_sync")
    assert [r["state"]["version"] for r in status.json()["replicas"]] == [str(number)] * 2


def test_a_failed_sync_leaves_both_on_the_old_version_and_names_the_cause(
    served: ServedApp, trainer: Any, versions: Any
) -> None:
    number = versions.next(2)
    sync(trainer, number, str(number))
    with pytest.raises(Exception, match=r"model\.typo\.weight"):
        sync(
            trainer, number + 1, str(number + 1), rename={"model.norm.weight": "model.typo.weight"}
        )
    assert_serves(new_model(number), PROMPT, served.generate(PROMPT, 4))
    status = served.get("/weight_sync").json()["replicas"]
    assert [each["state"]["state"] for each in status] == ["SERVING", "SERVING"]


def test_requests_that_run_during_a_sync_end_with_all_their_tokens(
    served: ServedApp, trainer: Any, versions: Any
) -> None:
    number = versions.next(2)
    sync(trainer, number, str(number))
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    with requests.post(f"{served.url}/generate", json=body, stream=True, timeout=120) as running:
        lines = running.iter_lines()
        next(lines)
        sync(trainer, number + 1, str(number + 1), pause="retract")
        rest = [line for line in lines if line.startswith(b"data: {")]
    meta = json.loads(rest[-1].removeprefix(b"data: "))["meta_info"]
    assert meta["completion_tokens"] == 1500
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == [str(number), str(number + 1)]
    assert [spans[0]["start"], spans[-1]["end"]] == [0, 1500]
    assert spans[0]["end"] == spans[1]["start"]


@pytest.mark.parametrize("transport", [None, "nixl"])
def test_refs_that_one_replica_is_handed_reach_both(
    served: ServedApp, trainer: Any, versions: Any, transport: str | None
) -> None:
    number = versions.next()
    call = trainer.load_through_a_replica.remote(
        served.name, f"SGLangServer:{MODEL}", number, str(number), transport
    )
    report = ray.get(call, timeout=150)
    assert report.verified
    assert len(report.ranks) == 2
    for answer in answers_of_both(served).values():
        assert answer["meta_info"]["weight_version"] == str(number)
    for _ in range(4):
        assert_serves(new_model(number), PROMPT, served.generate(PROMPT, 4))
