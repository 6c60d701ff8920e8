"""A session in which one call loads and another pulls rebuilds what is derived from weights (F8): upstream's own code.

The session manager and the runner's updater are upstream's; the model is small and derives one tensor from another, as
MLA models do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.ray.weight_sessions import note_loaded, rebuilding_after_pulls
from sglang.srt.ray.weight_sync.ledger import SessionBook


class Derived(torch.nn.Module):
    """`twice` is made of `base` after a load of `base`, and after nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.other = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.twice = torch.zeros(3)

    def load_weights(self, weights: Any) -> None:
        given = dict(weights)
        for name, tensor in given.items():
            getattr(self, name).data.copy_(tensor)
        if "base" in given:
            self.post_load_weights()

    def post_load_weights(self) -> None:
        self.twice = 2 * self.base.data


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Model, manager (upstream's, for one rank), the end that this package wraps, and its book."""
    model, book = Derived(), SessionBook()
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None: None)

    def post_load(*, run_post_load: bool) -> None:
        if run_post_load:
            model.post_load_weights()

    updater = SimpleNamespace(begin_weight_update=lambda: None, end_weight_update=post_load)
    manager_class = weight_updater.SchedulerWeightUpdaterManager
    manager = object.__new__(manager_class)
    manager.tp_worker = SimpleNamespace(
        weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=updater))]
    )
    manager.draft_worker, manager._session, manager.tp_cpu_group = None, None, None
    end = rebuilding_after_pulls(manager_class.end_weight_update, book)
    assert manager.begin_weight_update(BeginWeightUpdateReqInput()).success
    return SimpleNamespace(model=model, manager=manager, end=end, book=book)


@pytest.mark.parametrize("order", [("pull", "load"), ("load", "pull")])
def test_derived_tensors_are_rebuilt_whichever_comes_first(session: Any, order: Any) -> None:
    def pull() -> None:
        session.model.base.data.fill_(5.0)
        session.book.pulled = True

    def load() -> None:
        session.model.load_weights([("other", torch.ones(3))])
        note_loaded(session.manager)

    for step in order:
        {"pull": pull, "load": load}[step]()
    assert session.end(session.manager, EndWeightUpdateReqInput()).success
    assert session.model.twice.tolist() == [10.0] * 3


def test_upstreams_own_end_would_have_kept_the_old_one(session: Any) -> None:
    session.model.base.data.fill_(5.0)
    note_loaded(session.manager)
    session.manager.end_weight_update(EndWeightUpdateReqInput())
    assert session.model.twice.tolist() == [0.0] * 3


def test_a_session_keeps_its_records_although_upstream_replaces_it(session: Any) -> None:
    key = session.book.key
    note_loaded(session.manager)  # another object
    assert session.book.key == key
    session.end(session.manager, EndWeightUpdateReqInput())
    assert session.book.key != key
    assert session.book.pulled is False
