"""`GET /weight_sync/ui` in a real headless Chromium, over the real routes and fence."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from selenium import webdriver
from selenium.webdriver.common.by import By
from test_top import fleet_after, served
from test_weight_history import Fleet


def text(browser: webdriver.Chrome, element: str) -> str:
    return browser.find_element(By.ID, element).text


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the page did not get there in time"
        time.sleep(0.05)
    return value


def rows(browser: webdriver.Chrome, table: str) -> list[list[str]]:
    script = (
        "return [...document.getElementById(arguments[0]).rows]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return browser.execute_script(script, table)


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the browser's console has against the page itself (its policy included)."""
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]


def test_state_ranks_and_history_as_the_engine_tells_them(browser: webdriver.Chrome) -> None:
    with served(fleet_after("sync", "sync", "tear")) as url:
        browser.get(f"{url}/weight_sync/ui")
        until(lambda: text(browser, "age") == "live")
        assert text(browser, "state") == "TORN"
        assert "the cable broke" in text(browser, "reason")
        ranks = rows(browser, "ranks")
        assert [(row[0], row[1]) for row in ranks] == [("0", "VERIFIED"), ("1", "FAILED")]
        history = rows(browser, "history")
        assert [row[1] for row in history] == ["2 -> 3", "1 -> 2", "0 -> 1"]
        assert [row[2] for row in history] == ["torn", "committed", "committed"]
        assert complaints(browser) == []


def test_the_timeline_is_true_to_scale(browser: webdriver.Chrome) -> None:
    fleet = fleet_after("sync", "sync")
    longest, half = fleet.fence.history._records
    for record, factor in ((longest, 1.0), (half, 0.5)):
        steps = {"pause": 0.1 * factor, "begin": 0.2 * factor, "wire": 0.7 * factor}
        object.__setattr__(record, "step_seconds", steps)
        object.__setattr__(record, "pause_seconds", 1.0 * factor)
    with served(fleet) as url:
        browser.get(f"{url}/weight_sync/ui")
        until(lambda: text(browser, "age") == "live")
        widths = browser.execute_script(
            "return [...document.querySelectorAll('#history svg')].map(svg => "
            "[svg.getBoundingClientRect().width, ...[...svg.children].map(r => r.getBoundingClientRect().width)])"
        )
    newest, oldest = widths
    assert newest[0] == oldest[0] > 100
    for bar, factor in ((oldest, 1.0), (newest, 0.5)):
        assert [part / bar[0] for part in bar[1:]] == pytest.approx(
            [0.1 * factor, 0.2 * factor, 0.7 * factor], abs=0.005
        )


def test_it_follows_the_engine_and_says_when_it_is_gone(browser: webdriver.Chrome) -> None:
    fleet = fleet_after("sync")
    with served(fleet) as url:
        browser.get(f"{url}/weight_sync/ui")
        until(lambda: text(browser, "state") == "SERVING")
        fleet.fence.machine.version = "77"
        until(lambda: "version 77" in text(browser, "line"))
    until(lambda: text(browser, "age").startswith("no answer from the engine"))
    assert not browser.find_element(By.ID, "ask").is_displayed()
    assert "s old" in text(browser, "age")
    assert "version 77" in text(browser, "line"), "what was known last stays on the page"


def test_text_from_elsewhere_never_becomes_markup(browser: webdriver.Chrome) -> None:
    fleet = fleet_after("sync", "tear")
    attack = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    fleet.fence.machine.torn_reason = attack
    for record in fleet.fence.history._records:
        object.__setattr__(record, "version", attack)
    with served(fleet) as url:
        browser.get(f"{url}/weight_sync/ui")
        until(lambda: text(browser, "age") == "live")
        assert text(browser, "reason") == attack
        assert attack in rows(browser, "history")[0][1]
        assert browser.title == "Weight sync"
        # The second line of defence: even markup that got in could run nothing.
        browser.execute_script(
            "document.body.insertAdjacentHTML('beforeend', arguments[0])", attack
        )
        time.sleep(0.2)
        assert browser.title == "Weight sync"
        assert any("Content Security Policy" in told for told in complaints(browser))


def test_the_page_and_its_data_are_behind_the_key(browser: webdriver.Chrome) -> None:
    with served(fleet_after("sync"), api_key="secret") as url:
        assert requests.get(f"{url}/weight_sync/ui").status_code == 401
        assert requests.get(f"{url}/weight_sync/overview").status_code == 401
        header = {"headers": {"Authorization": "Bearer secret"}}
        browser.execute_cdp_cmd("Network.setExtraHTTPHeaders", header)
        browser.get(f"{url}/weight_sync/ui")
        until(lambda: text(browser, "state") == "SERVING")


def test_a_saved_page_asks_for_engine_and_key(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """How one opens it where the engine has a key, which a browser can't send with a link."""
    saved = tmp_path / "weights.html"
    with served(fleet_after("sync"), api_key="secret", cors=True) as url:
        answer = requests.get(f"{url}/weight_sync/ui", headers={"Authorization": "Bearer secret"})
        saved.write_bytes(answer.content)
        browser.get(saved.as_uri())
        until(lambda: browser.find_element(By.ID, "ask").is_displayed())
        browser.find_element(By.ID, "address").send_keys(url)
        browser.find_element(By.CSS_SELECTOR, "#ask button").click()
        until(lambda: "another API key" in text(browser, "age"))
        browser.find_element(By.ID, "key").send_keys("secret")
        browser.find_element(By.CSS_SELECTOR, "#ask button").click()
        until(lambda: text(browser, "age") == "live")
        assert text(browser, "state") == "SERVING"
        assert not browser.find_element(By.ID, "ask").is_displayed()


def test_it_needs_no_other_file(browser: webdriver.Chrome) -> None:
    with served(Fleet()) as url:
        browser.get(f"{url}/weight_sync/ui")
        until(lambda: text(browser, "age") == "live")
        loaded = browser.execute_script(
            "return performance.getEntriesByType('resource').map(entry => entry.name)"
        )
    assert set(loaded) <= {f"{url}/weight_sync/overview", f"{url}/favicon.ico"}
