"""A headless Chromium, where Debian's `chromium` and `chromium-driver` are installed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


@contextlib.contextmanager
def browsing(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A selenium driver. Skips the test, naming what lacks, where there is no browser."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which the extra dev brings")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip(f"needs {'chromium' if browser is None else 'chromedriver'}: apt-get install chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for option in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-extensions",
                       "disable-background-networking", "no-first-run", f"user-data-dir={profile}",
                       f"window-size={width},{height}"):  # fmt: skip
            options.add_argument(f"--{option}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            page.set_script_timeout(30)
            yield page
        finally:
            page.quit()


def until(holds: Callable[[], T], what: str, seconds: float = 20.0) -> T:
    """What `holds` returns as soon as it is true. Elements come and go meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            if found := holds():
                return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def complaints(page: Any) -> list[str]:
    """What the console has heard since it was asked last: errors, and what its policy has kept out."""
    return [entry["message"] for entry in page.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
