"""A real Chromium. Where none is installed these tests are skipped, but not in CI (`SGLANG_RDT_NEEDS_CHROMIUM=1`)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parents[1] / "weight_sync"))
FLAGS = (
    "--headless",
    "--no-sandbox",  # CI runs as root, where Chromium's own sandbox refuses to start
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,820",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "no chromium and chromedriver on the path: scripts/browser.sh"
        assert not os.environ.get("SGLANG_RDT_NEEDS_CHROMIUM"), missing
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    running.set_page_load_timeout(30)
    yield running
    running.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> webdriver.Chrome:
    """The session's browser without headers, cookies and pages of the test before."""
    chromium.execute_cdp_cmd("Network.enable", {})
    chromium.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {}})
    chromium.get("about:blank")
    chromium.get_log("browser")
    return chromium
