"""The console on a real cluster: an answer goes on before one's eyes when its session moves or its replica dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deployment.settings import AppArgs
from tests.deployment.browser import browsing, complaints, until
from tests.e2e.cluster import epoch, replicas, two_replicas

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with two_replicas(AppArgs(durable=None)) as url:
        yield url


@pytest.fixture
def page(url: str) -> Iterator[Any]:
    with browsing() as page:
        page.get(f"{url}/console")
        until(lambda: "2 replicas" in text(page, "state"), "both replicas are shown", 60)
        yield page


def text(page: Any, element: str) -> str:
    return page.find_element("id", element).text


ENDLESS = """
const fetched = window.fetch;
window.fetch = (resource, how) => {
  const asks = how?.body?.includes?.('"messages"');
  const body = asks && JSON.stringify({ ...JSON.parse(how.body), ignore_eos: true });
  return fetched(resource, asks ? { ...how, body } : how);
};
"""
"""The demo model may end its answer at any token, which must not be before the kill."""


def begin(page: Any) -> str:
    """A long answer, which has begun to come, and the name of its session."""
    page.execute_script(ENDLESS)
    page.execute_script(
        "document.getElementById('max-tokens').value = 600; document.getElementById('temperature').value = 2"
    )
    page.find_element("id", "ask").send_keys("Tell a very long story.\n")
    until(lambda: len(page.find_elements("css selector", "#messages .round")) > 3, "an answer comes")
    until(
        lambda: "owner" in text(page, "placement") and "owner none" not in text(page, "placement"), "its owner is shown"
    )
    return text(page, "chat-title")


def owner(page: Any) -> str:
    found = re.search(r"owner (\S+),", text(page, "placement"))
    assert found is not None
    return found[1]


def shown(page: Any) -> str:
    boxes = "[...document.querySelectorAll('#messages .assistant:last-child .round')]"
    return page.execute_script(f"return {boxes}.map(box => box.textContent).join('')")


def ended(page: Any, url: str, session: str) -> dict[str, Any]:
    """The session once its answer is over, which the page shows as it is."""
    until(lambda: page.find_element("id", "send").is_enabled(), "the answer is whole", 90)
    found = httpx.get(f"{url}/v1/sessions/{session}").json()
    assert shown(page) == found["transcript"][-1]["content"]
    return found


def test_a_session_at_rest_is_moved_and_the_tree_shows_where_it_is(page: Any, url: str):
    httpx.post(f"{url}/v1/sessions", json={"id": "trip"}).raise_for_status()
    until(lambda: page.find_element("css selector", "[data-session=trip] button").click() or True, "it is listed")
    before = httpx.get(f"{url}/v1/sessions/trip").json()
    until(lambda: f"epoch {before['epoch']}" in text(page, "placement"), "where it is, is shown")
    page.find_element("css selector", "#migrate-form button").click()
    until(lambda: f"moved from {before['replica']}" in text(page, "log"), "the move is told")
    after = httpx.get(f"{url}/v1/sessions/trip").json()
    shown = f"owner {after['replica']}, epoch {after['epoch']}"
    until(lambda: shown in text(page, "tree"), "the tree shows its new owner")
    assert after["replica"] != before["replica"] and epoch(after) > epoch(before) and complaints(page) == []


def test_an_answer_goes_on_while_its_session_moves(page: Any, url: str):
    session, before = begin(page), owner(page)
    page.find_element("css selector", "#migrate-form button").click()
    until(lambda: f"moved from {before}" in text(page, "log"), "the move is told")
    until(lambda: owner(page) != before, "the other owner is shown")
    assert ended(page, url, session)["replica"] == owner(page)


def test_an_answer_goes_on_when_its_replica_is_killed(page: Any, url: str):
    session, before = begin(page), owner(page)
    with httpx.Client(base_url=url) as client:
        os.kill(replicas(client)[before], signal.SIGKILL)
    until(lambda: f"Replica {before} is gone" in text(page, "log"), "the death is told", 30)
    until(lambda: f"{session}: owner {before} to" in text(page, "log"), "the takeover is told", 60)
    assert ended(page, url, session)["replica"] != before
    until(lambda: re.search(r"Replica \S+ is there", text(page, "log")), "another replica takes its place", 90)
