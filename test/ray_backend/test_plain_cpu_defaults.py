"""`--device cpu` on a machine without SGLang's CPU kernels: what is chosen, and that the user wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.plain_cpu_hook import DEFAULT_MAX_TOTAL_TOKENS


def resolved(model_path: Path, **arguments: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path=str(model_path), device="cpu", **arguments)
    server_args.resolve_once()
    return resolved_view(server_args)


def test_what_the_user_leaves_open_is_chosen_for_a_plain_cpu(tiny_model: Path):
    view = resolved(tiny_model)
    assert view.attention_backend == "torch_native"
    assert view.max_total_tokens == DEFAULT_MAX_TOTAL_TOKENS


def test_what_the_user_sets_wins(tiny_model: Path):
    view = resolved(tiny_model, attention_backend="triton", max_total_tokens=123)
    assert (view.attention_backend, view.max_total_tokens) == ("triton", 123)


def test_with_the_kernels_upstreams_choices_hold(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang.srt.arg_groups.plain_cpu_hook.is_cpu", lambda: True)
    assert resolved(tiny_model).max_total_tokens is None


def test_the_flags_are_off_unless_asked_for(tiny_model: Path):
    from sglang.srt.server_args import ServerArgs

    plain = ServerArgs(model_path=str(tiny_model))
    assert (plain.use_ray, plain.enable_rdt_weight_sync) == (False, False)


@pytest.mark.parametrize("spelling", ["--ray", "--use-ray"])
def test_both_spellings_of_the_ray_flag_are_known(tiny_model: Path, spelling: str):
    from sglang.srt.server_args import prepare_server_args

    assert prepare_server_args(["--model-path", str(tiny_model), spelling]).use_ray is True
