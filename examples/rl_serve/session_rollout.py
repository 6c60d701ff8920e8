"""Multi-turn rollouts over Serve sessions: each sample is a session of two turns, streamed.

The first turn is a draft, the "user" then says some fixed tokens, and the second turn is what earns the reward and is
learned from. Both turns of a sample reach the same replica, whose prefix cache holds the draft.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from records import RolloutBatch
from rollout import PLAIN_SAMPLING, BatchShape, parse_answers

USER_TURN = (7, 11, 13)
"""What the user says between the turns."""


class SessionRollout:
    """A `Rollout` (see rl_cpu/rollout.py) over a Serve application."""

    def __init__(self, url: str, shape: BatchShape, *, draft_tokens: int = 8) -> None:
        """Args:
        url: of Serve's HTTP proxy.
        shape: prompts, samples of each, and tokens of the second turn.
        draft_tokens: of the first turn.
        """
        self._url = url
        self._shape = shape
        self._draft_tokens = draft_tokens
        self._pool = ThreadPoolExecutor(shape.num_prompts * shape.samples_per_prompt)
        self.cached_tokens = 0
        """Prompt tokens of second turns that came from the replicas' caches, so far."""

    def generate(self, prompts: Sequence[Sequence[int]]) -> RolloutBatch:
        """Samples of every prompt, all at once; each in a session of its own."""
        started = time.perf_counter()
        samples = [list(p) for p in prompts for _ in range(self._shape.samples_per_prompt)]
        done = list(self._pool.map(self._sample, samples))
        return parse_answers(
            [conversation for conversation, _ in done],
            [answer for _, answer in done],
            self._shape.samples_per_prompt,
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        self._pool.shutdown()

    def _sample(self, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        opened = self._checked(requests.post(f"{self._url}/sessions", timeout=60)).json()
        session = opened["session_id"]
        draft = self._turn(session, prompt, self._draft_tokens)
        said = [token for _, token, *_ in draft["meta_info"]["output_token_logprobs"]]
        conversation = [*prompt, *said, *USER_TURN]
        answer = self._turn(session, conversation, self._shape.new_tokens)
        self.cached_tokens += answer["meta_info"]["cached_tokens"]
        self._checked(requests.delete(f"{self._url}/sessions/{session}", timeout=60))
        return conversation, answer

    def _turn(self, session: str, tokens: list[int], length: int) -> dict[str, Any]:
        """One streamed turn; the last event has all of it."""
        body = {
            "input_ids": tokens,
            "sampling_params": {**PLAIN_SAMPLING, "max_new_tokens": length},
            "return_logprob": True,
            "stream": True,
        }
        with requests.post(
            f"{self._url}/generate",
            json=body,
            headers={"x-session-id": session},
            stream=True,
            timeout=120,
        ) as answer:
            self._checked(answer)
            events = [line for line in answer.iter_lines() if line.startswith(b"data: {")]
        if not events:
            raise RuntimeError(f"session {session!r}: the stream ended without an event")
        last: dict[str, Any] = json.loads(events[-1].removeprefix(b"data: "))
        if "error" in last:
            raise RuntimeError(f"session {session!r}: {last['error']!r}")
        return last

    @staticmethod
    def _checked(answer: requests.Response) -> requests.Response:
        if not answer.ok:
            raise RuntimeError(
                f"{answer.request.method} {answer.url} answered {answer.status_code}: {answer.text[:500]!r}"
            )
        return answer
