"""The page and the terminal dashboard over a real engine into which a real trainer syncs over RDT."""

from __future__ import annotations

import json

import pytest
import ray
from selenium import webdriver
from selenium.webdriver.common.by import By
from support.engine import RunningEngine
from support.trainer import start_trainer
from test_weight_ui import rows, text, until

from sglang.srt.ray.weight_sync import top

TIMEOUT_S = 120


def test_both_show_what_the_publisher_reported(
    browser: webdriver.Chrome, shared_engine: RunningEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = start_trainer()
    try:
        engine = (shared_engine.url, shared_engine.actors, "engine")
        ray.get(trainer.connect.remote([engine]), timeout=TIMEOUT_S)
        reports = [
            ray.get(trainer.sync.remote(seed, f"picture-{seed}"), timeout=TIMEOUT_S)
            for seed in (3, 4)
        ]
    finally:
        ray.kill(trainer)
    assert top.main(["--once", "--json", shared_engine.url]) == 0
    told = json.loads(capsys.readouterr().out)["engines"][shared_engine.url]
    assert told["version"] == reports[-1].version
    for record, report in zip(told["history"], reversed(reports), strict=False):
        (pull,) = report.ranks["engine"]
        assert (record["version"], record["outcome"]) == (report.version, "committed")
        assert record["total_bytes"] == report.total_bytes
        assert record["step_seconds"]["wire"] == pull.wire_seconds
        # The publisher's own clock runs around the engine's.
        assert record["step_seconds"]["pause"] <= report.phase_seconds["pause"]

    browser.get(f"{shared_engine.url}/weight_sync/ui")
    until(lambda: text(browser, "age") == "live")
    assert text(browser, "line") == "SERVING version picture-4"
    assert [row[1] for row in rows(browser, "history")][:1] == ["picture-3 -> picture-4"]
    assert rows(browser, "ranks")[0][:2] == ["0", "VERIFIED"]
    assert browser.find_elements(By.CSS_SELECTOR, "#history svg .wire")
