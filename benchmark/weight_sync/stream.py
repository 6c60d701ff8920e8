"""What a running request feels: the moments at which its tokens come, and the longest gap between two of them."""

from __future__ import annotations

import itertools
import statistics
import threading
import time

import requests

PROMPT = list(range(5, 21))
START_TIMEOUT_S = 60.0


class TokenStream:
    """Streaming requests one after the other, on a thread of its own; times are `time.monotonic`'s."""

    def __init__(self, url: str, length: int = 1500) -> None:
        self._url = url
        self._length = length
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._times: list[float] = []
        self._failure: BaseException | None = None

    def __enter__(self) -> TokenStream:
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self._times) < 10:
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._url!r} streamed no tokens within {START_TIMEOUT_S:g} s")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=START_TIMEOUT_S)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        sampling = {"max_new_tokens": self._length, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
        try:
            while not self._stop.is_set():
                with requests.post(
                    f"{self._url}/generate", json=body, stream=True, timeout=START_TIMEOUT_S
                ) as answer:
                    answer.raise_for_status()
                    for line in answer.iter_lines(chunk_size=1):
                        if line.startswith(b"data: {"):
                            self._times.append(time.monotonic())
                        if self._stop.is_set():
                            return
        except BaseException as error:  # raised again on the caller's thread
            self._failure = error

    def felt(self, started: float, ended: float) -> dict[str, float]:
        """The longest gap between tokens that touches this span, the usual one before it, and tokens a second in it.

        Call it some tokens after `ended`, or the last gap is not seen.
        """
        gaps = list(itertools.pairwise(list(self._times)))
        inside = [b - a for a, b in gaps if b > started and a < ended]
        before = [b - a for a, b in gaps if b <= started][-50:]
        tokens = sum(started < moment <= ended for moment in self._times)
        return {
            "longest_gap": max(inside),
            "usual_gap": statistics.median(before),
            "tokens_per_second": tokens / (ended - started),
        }

    def wait_for_tokens(self, count: int) -> None:
        wanted = len(self._times) + count
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self._times) < wanted:
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the stream stood still for {START_TIMEOUT_S:g} s")
            time.sleep(0.005)
