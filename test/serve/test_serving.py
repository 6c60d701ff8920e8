"""Requests through Serve's HTTP proxy, with the clients that people use; values come from Hugging Face's forward."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from support.models import ENGINE_SEED, new_model, tokenizer
from support.oracle import GAP, assert_serves, greedy
from support.serve_app import MODEL, ServedApp

MESSAGES = [{"role": "user", "content": "bada gepi"}]


def version_of(served: ServedApp) -> str:
    return str(served.get("/weight_sync").json()["replicas"][0]["state"]["version"])


@pytest.fixture
def model(served: ServedApp) -> Any:
    """What the engines serve now; a version's number is the seed of its weights."""
    version = version_of(served)
    return new_model(ENGINE_SEED if version == "default" else int(version))


def prompt_of(messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer()(text)["input_ids"])


def test_a_chat_answer_has_the_models_tokens_and_log_probabilities(
    served: ServedApp, model: Any
) -> None:
    answer = served.openai().chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        extra_body={"ignore_eos": True},
    )
    expected = greedy(model, prompt_of(MESSAGES), 6)
    choice = answer.choices[0]
    assert choice.message.content == tokenizer().decode(expected.tokens)
    logprobs = [each.logprob for each in choice.logprobs.content]
    assert max(abs(a - b) for a, b in zip(logprobs, expected.logprobs, strict=True)) < GAP
    assert answer.usage.prompt_tokens == len(prompt_of(MESSAGES))
    assert answer.usage.completion_tokens == 6


def test_a_chat_stream_says_the_same_in_pieces(served: ServedApp) -> None:
    asked = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 6,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = served.openai().chat.completions.create(**asked)
    pieces = list(served.openai().chat.completions.create(**asked, stream=True))
    assert len(pieces) > 2
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_completions_honour_n_and_stream(served: ServedApp) -> None:
    asked = {
        "model": MODEL,
        "prompt": "bada",
        "max_tokens": 4,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    answer = served.openai().completions.create(**asked, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == answer.choices[1].text
    stream = served.openai().completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].text for piece in stream) == answer.choices[0].text


def test_generate_keeps_request_id_token_ids_and_weight_version(
    served: ServedApp, model: Any
) -> None:
    body = {"input_ids": [5, 6, 7], "rid": "mine-1", "sampling_params": {"max_new_tokens": 3}}
    meta = served.post("/generate", body | {"return_logprob": True}).json()["meta_info"]
    assert meta["id"] == "mine-1"
    assert meta["weight_version"] == version_of(served)
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert_serves(model, [5, 6, 7], served.generate([5, 6, 7], 5))


def test_a_regular_expression_and_a_json_schema_are_obeyed(served: ServedApp) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    chosen = served.openai().chat.completions.create(**asked, extra_body={"regex": "(yes|no)"})
    assert chosen.choices[0].message.content in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = served.openai().chat.completions.create(**asked, response_format=wanted)
    # The random weights like blanks, so the object may not end within the tokens.
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_tokenize_and_detokenize_agree_with_the_tokenizer(served: ServedApp) -> None:
    tokens = served.post("/tokenize", {"model": MODEL, "prompt": "bada gepi"}).json()["tokens"]
    assert tokens == tokenizer()("bada gepi")["input_ids"]
    text = served.post("/detokenize", {"model": MODEL, "tokens": tokens}).json()["text"]
    assert text == "bada gepi"


def test_a_wrong_request_is_told_so_by_sglang_itself(served: ServedApp) -> None:
    answer = served.post("/v1/chat/completions", {"model": MODEL, "messages": []})
    assert answer.status_code == requests.codes.bad_request
    assert "messages" in answer.text.lower()
    assert served.post("/generate", data=b"no json").status_code == requests.codes.bad_request


def test_the_models_are_listed(served: ServedApp) -> None:
    assert [model.id for model in served.openai().models.list().data] == [MODEL]
    assert served.openai().models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("path", ["/flush_cache", "/update_weights_from_disk", "/open_session"])
def test_what_steers_one_engine_is_not_passed_to_a_chance_replica(
    served: ServedApp, path: str
) -> None:
    assert served.post(path, {}).status_code == requests.codes.not_found


def test_requests_reach_both_replicas(served: ServedApp) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    answers = [served.post("/v1/chat/completions", body) for _ in range(16)]
    seen = {answer.headers["x-sglang-replica"] for answer in answers}
    assert seen == {replica["replica"] for replica in served.replicas()}
