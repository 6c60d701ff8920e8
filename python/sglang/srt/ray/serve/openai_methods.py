"""The methods by which Ray's own LLM ingress calls a server: chat, completions, embeddings and the like.

Each is an HTTP exchange with SGLang's own application, so they answer as its endpoints do. Our ingress does not use
them (it hands requests over as they came); they are what makes `LLMConfig(server_cls=...)` work with Ray's builder.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from ray.llm._internal.serve.core.configs import openai_api_models as models

from sglang.srt.ray.serve.exchange import Head, HttpCall

_OK = range(HTTPStatus.OK, HTTPStatus.MULTIPLE_CHOICES)


class OpenAIMethods:
    """Mixed into the server class, which provides `http`."""

    def http(self, call: HttpCall) -> AsyncIterator[Head | bytes]:
        """One exchange: the head, then the body in pieces."""
        raise NotImplementedError

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Server-sent events as text when `stream` is set, else one response or error."""
        answer = self._post("/v1/chat/completions", request, raw_request_info)
        async for piece in _openai(answer, models.ChatCompletionResponse):
            yield piece

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        answer = self._post("/v1/completions", request, raw_request_info)
        async for piece in _openai(answer, models.CompletionResponse):
            yield piece

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        answer = self._post("/v1/embeddings", request, raw_request_info)
        async for piece in _openai(answer, models.EmbeddingResponse):
            yield piece

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        answer = self._post("/v1/score", request, raw_request_info)
        async for piece in _openai(answer, models.ScoreResponse):
            yield piece

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        answer = self._post("/tokenize", request, raw_request_info)
        async for piece in _openai(answer, models.TokenizeResponse):
            yield piece

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        answer = self._post("/detokenize", request, raw_request_info)
        async for piece in _openai(answer, models.DetokenizeResponse):
            yield piece

    def _post(self, path: str, request: Any, raw_request_info: Any) -> AsyncIterator[Head | bytes]:
        headers = tuple(getattr(raw_request_info, "headers", {}).items())
        # Only what the client set: a default of the request class is no wish of the client's.
        body = request.model_dump(mode="json", exclude_unset=True)
        call = HttpCall.json(path, body)
        return self.http(
            call.with_headers(
                [(k, v) for k, v in headers if k.lower() not in ("content-type", "content-length")]
            )
        )


async def _openai(answer: AsyncIterator[Head | bytes], response_type: Any) -> AsyncIterator[Any]:
    head = await anext(answer)
    assert isinstance(head, Head)
    streams = any("text/event-stream" in value for _, value in head.headers)
    if streams and head.status in _OK:
        async for piece in answer:
            assert isinstance(piece, bytes)
            yield piece.decode()
        return
    body = b"".join([piece async for piece in answer if isinstance(piece, bytes)])
    if head.status in _OK:
        yield response_type.model_validate_json(body)
    else:
        yield _error(head.status, body)


def _error(status: int, body: bytes) -> Any:
    """SGLang's error body (flat, or under `error`) as the class that Ray's ingress looks for."""
    try:
        told = json.loads(body)
    except ValueError:
        told = {"message": body.decode(errors="replace")}
    told = told.get("error", told) if isinstance(told, dict) else {"message": str(told)}
    told = told if isinstance(told, dict) else {"message": str(told)}
    info = models.ErrorInfo(
        message=str(told.get("message") or told),
        type=str(told.get("type", "error")),
        param=told.get("param"),
        code=status,
    )
    return models.ErrorResponse(error=info)
