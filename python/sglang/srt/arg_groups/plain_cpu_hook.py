"""Defaults for `--device cpu` on a machine without SGLang's CPU kernels, which are not on the package index.

Upstream's CPU defaults assume those kernels (`SGLANG_USE_CPU_ENGINE=1` switches them on), and would give the KV cache
most of the machine's memory. Whatever the user sets wins.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.utils import is_cpu

DEFAULT_MAX_TOTAL_TOKENS = 32768
_SOURCE = "sglang_rdt_plain_cpu"


def declare_plain_cpu_defaults(server_args: Any) -> None:
    """Choose attention backend and KV cache size where the user left them open, and let an idle rank sleep."""
    if is_cpu():
        return  # the kernels are there: upstream's own choices hold
    chosen = resolving_view(server_args)
    if chosen.attention_backend is None:
        declare_resolution(server_args, _SOURCE, attention_backend="torch_native")
    if not chosen.sleep_on_idle:
        # An idle scheduler polls without a pause, which takes a core away from whoever shares the CPU: the trainer.
        declare_resolution(server_args, _SOURCE, sleep_on_idle=True)
    if chosen.max_total_tokens is None:
        declare_resolution(server_args, _SOURCE, max_total_tokens=DEFAULT_MAX_TOTAL_TOKENS)
