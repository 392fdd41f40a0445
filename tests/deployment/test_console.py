"""The console: how it is served, and in a headless Chromium, with the demo model behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployment.console import files
from state.document import open_document
from tests.deployment.browser import browsing, complaints, until
from tests.deployment.serving import serving

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "deployment" / "console" / "static"
COUNT = "Count from 3 in steps of 2, 12 numbers."
COUNTED = "3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25"
TAB = "\ue004"
"""The key, as WebDriver names it."""

PROBES = "<img src=x onerror=alert(1)><b>bold</b>"

CUT = """
const real = window.fetch;
window.resumed = [];
window.fetch = async (url, options) => {
  const response = await real(url, options);
  const after = options.headers["last-event-id"];
  if (after) window.resumed.push(after);
  if (!String(url).endsWith("/turns") || options.method !== "POST" || window.cut) return response;
  window.cut = true;
  const [reader, parts] = [response.body.getReader(), {count: 0}];
  const body = new ReadableStream({async pull(out) {
    if (parts.count++ === 2) { reader.cancel(); out.error(new TypeError("cut")); return; }
    const {done, value} = await reader.read();
    if (done) out.close(); else out.enqueue(value);
  }});
  return new Response(body, {headers: response.headers});
};
"""
"""The first answer breaks off after two parts of its body."""


SENT_ON = CUT.replace(
    'out.error(new TypeError("cut"));',
    """
    const start = new TextEncoder().encode(`event: resume\\n${window.start}\\ndata: {}\\n\\n`);
    out.enqueue(start); out.close();""",
).replace(
    "if (done) out.close();",
    """window.start ??= /^id: .*$/m.exec(new TextDecoder().decode(value))[0];
    if (done) out.close();""",
)
"""The first answer's connection is replaced after two parts; the event that says so names the turn's start."""


TWO = """
const real = window.fetch;
window.moves = [];
window.fetch = async (url, options) => {
  const path = new URL(url).pathname;
  if (path.endsWith("/migrate")) {
    window.moves.push([path, options.body]);
    return Response.json({from: "a", to: "b", frontier: 7, pause_seconds: 0.0123});
  }
  const response = await real(url, options);
  if (path !== "/v1/replicas") return response;
  const {data} = await response.json();
  return Response.json({data: [...data, {...data[0], id: "b"}]});
};
"""
"""A second replica, to which everything moves at once; a real one is in `tests/e2e/test_console.py`."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Any]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The console with a key of its own."""
    browser.get(f"{url}/console")
    use_key(browser, "console-test")
    yield browser
    assert complaints(browser) == []


def use_key(page: Any, key: str) -> None:
    field = page.find_element("id", "key")
    field.clear()
    field.send_keys(key + "\n")
    until(lambda: page.find_element("id", "state").text.startswith("1 replica,"), "the replica is shown")


def say(page: Any, text: str, **options: str) -> str:
    """The answer that the page shows in the end, without what it says of it."""
    before = len(page.find_elements("css selector", "#messages .assistant"))
    for field, value in {"temperature": "0", **options}.items():
        page.find_element("id", field).clear()
        page.find_element("id", field).send_keys(value)
    page.find_element("id", "ask").send_keys(text + "\n")
    until(lambda: len(page.find_elements("css selector", "#messages .assistant")) > before, "an answer is shown")
    until(lambda: page.find_element("id", "send").is_enabled() and " rounds" in note(page), "the answer is whole")
    return shown(page)


def note(page: Any) -> str:
    return page.find_elements("css selector", "#messages .assistant [data-note]")[-1].text


def shown(page: Any) -> str:
    return "".join(box.text for box in page.find_elements("css selector", "#messages .assistant:last-child .round"))


def click(page: Any, selector: str) -> None:
    page.execute_script("arguments[0].scrollIntoView()", page.find_element("css selector", selector))
    page.find_element("css selector", selector).click()


# ------------------------------------------------------------------------------------------------ as it is served


def test_the_page_and_its_files_are_served_with_a_policy_that_lets_nothing_else_in(url: str):
    with httpx.Client(base_url=url) as client:
        page = client.get("/console")
        parts = re.findall(r'(?:src|href)="(console/[\w.]+)"', page.text)
        modules = {f"console/{name}" for file in STATIC.glob("*.js") for name in
                   re.findall(r'from "\./([\w.]+)"', file.read_text("utf-8"))}  # fmt: skip
        assert {f"console/{file.name}" for file in STATIC.iterdir()} == {*parts, *modules, "console/index.html"}
        answers = [page, *(client.get(f"/{part}") for part in {*parts, *modules})]
    for answer in answers:
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["script-src"] == "'self'"
    kinds = {answer.headers["content-type"].partition(";")[0] for answer in answers}
    assert kinds == {"text/html", "text/css", "text/javascript", "image/svg+xml"}


def test_nothing_of_it_lies_elsewhere_or_makes_markup_of_text():
    for file in STATIC.iterdir():
        text = file.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|//[\w-]+\.\w|@import|url\(", text), file.name
        assert not re.search(r"innerHTML = |outerHTML|insertAdjacentHTML|document\.write|eval\(| style=", text), (
            file.name
        )


@pytest.mark.parametrize("name", ["files.py", "..%2Ffiles.py", "..%2f..%2fsettings.py", "nothing", "%00"])
def test_what_is_no_file_of_the_page_is_not_found(url: str, name: str):
    answer = httpx.get(f"{url}/console/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_it_asks_only_for_what_the_interface_describes():
    described = json.loads((ROOT / "docs" / "openapi.json").read_text("utf-8"))["paths"]
    told = (STATIC / "api.js").read_text("utf-8")
    asked = re.findall(r'(?:\("(GET|POST|DELETE)", |data\()(?:"([^"]+)"|of\(name(?:, [`"]([^`"]+)[`"])?\))', told)
    assert len(asked) == len(re.findall(r"^export const \w+ = (?!\{)|^export const fork", told, re.MULTILINE))
    for method, path, rest in asked:
        whole = f"/{path}" if path else "/v1/sessions/{name}" + rest.replace("${", "{")
        assert (method or "GET").lower() in described[whole], whole
    assert "fetch(" not in "".join(file.read_text("utf-8") for file in STATIC.glob("*.js") if file.name != "api.js")


def test_the_package_has_all_of_its_files():
    patterns = re.search(r"^deployment = \[(.*)\]$", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert patterns is not None and '"console/static/*"' in patterns[1]
    assert {f"/console/{file.name}" for file in STATIC.iterdir()} | {"/console"} == files.PATHS


# ------------------------------------------------------------------------------------------------ in a browser


def test_an_answer_shows_what_each_round_brought_and_its_session_a_tree(page: Any, url: str):
    use_key(page, "tree")
    assert say(page, COUNT) == COUNTED
    boxes = page.find_elements("css selector", "#messages .round")
    tokens = [int(box.get_attribute("title").split()[0]) for box in boxes]
    drafts = [int(box.get_attribute("class").rpartition("shade-")[2]) for box in boxes]
    with httpx.Client(base_url=url, headers={"authorization": "Bearer tree"}) as client:
        (session,) = client.get("/v1/sessions").json()["data"]
        (turn,) = client.get(f"/v1/sessions/{session['id']}/turns").json()["data"]
    assert sum(tokens) in (turn["completion_tokens"], turn["completion_tokens"] - 1), "the end token may have no text"
    assert drafts == [min(count - 1, 6) for count in tokens] and max(drafts) > 2
    page.find_element("id", "checkpoint-name").send_keys("before\n")
    until(lambda: "◆ before" in tree(page), "the checkpoint is in the tree")
    page.find_element("id", "fork-name").send_keys("other\n")
    until(lambda: "other" in tree(page), "the fork is in the tree")
    assert say(page, "What is my locker code?")
    until(lambda: "turn 2" in tree(page), "the second turn is in the tree")
    # One first turn, which both have; and of the two, only the session's has another one.
    turns = [line.text.split("\n")[0] for line in page.find_elements("css selector", "#tree [data-turn]")]
    assert [text[:6] for text in turns] == ["turn 1", "turn 2"]
    assert re.search(r"◆ before at \d+: device, host", tree(page))
    counts = [int(row.text.split()[-1]) for row in page.find_elements("css selector", "#histogram tbody tr")]
    assert sum(counts) > 5 and page.find_element("id", "acceptance").text != "-"


def tree(page: Any) -> str:
    return page.find_element("id", "tree").text


def test_a_stream_that_breaks_goes_on_after_the_event_that_was_had_last(page: Any):
    page.execute_script(CUT)
    assert say(page, COUNT) == COUNTED
    (after,) = page.execute_script("return window.resumed")
    assert re.fullmatch(r"[0-9a-f]{32}\.\d+\.[0-9a-f]{8}", after)
    assert "the stream broke" in page.find_element("id", "log").text


def test_who_is_sent_on_goes_on_after_what_was_had_whatever_the_event_says_of_it(page: Any):
    page.execute_script(SENT_ON)
    assert say(page, COUNT) == COUNTED
    (after,) = page.execute_script("return window.resumed")
    assert after != page.execute_script("return window.start").removeprefix("id: ")


def test_a_session_is_exported_and_deleted(page: Any, url: str, tmp_path: Path):
    use_key(page, "export")
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find_element("id", "create-name").send_keys("a/b\n")
    click(page, "[data-session='a/b'] button") if until(lambda: "a/b" in tree(page), "it is listed") else None
    say(page, COUNT)
    click(page, "#export")
    (file,) = until(lambda: list(tmp_path.glob("*.dfs")), "the file is there")
    assert file.name == "a_b.dfs" and open_document(file.read_bytes()).manifest.session.id == "a/b"
    click(page, "#delete")
    assert "a/b" in page.find_element("id", "confirm").text
    click(page, "#confirm-no")
    click(page, "#delete")
    click(page, "#confirm-yes")
    until(lambda: "none yet" in tree(page), "it is gone")
    assert httpx.get(f"{url}/v1/sessions", headers={"authorization": "Bearer export"}).json()["data"] == []


def test_a_session_is_moved_to_the_replica_that_was_chosen(page: Any):
    use_key(page, "moves")
    page.execute_script(TWO)
    page.find_element("id", "create-name").send_keys("one\n")
    until(lambda: page.find_element("css selector", "[data-session=one] button").click() or True, "it is listed")
    until(lambda: page.find_element("css selector", "#migrate-to option").text == "b", "the other one is offered")
    click(page, "#migrate-form button")
    until(lambda: "moved from a to b at 7; it stood for 12 ms" in page.find_element("id", "log").text, "it is told")
    assert page.execute_script("return window.moves") == [["/v1/sessions/one/migrate", '{"to":"b"}']]


TAKEN_OVER = """
const told = arguments[arguments.length - 1];
const said = [];
import("/console/known.js").then(({Known}) => {
  const known = new Known((text) => said.push(text));
  const looks = [["a", "1.1"], ["a", "1.1"], [null, "1.1"], [null, "2.1"], ["b", "2.1"], ["b", "2.1"]];
  for (const [replica, epoch] of looks) known.noteSessions([{id: "trip", replica, epoch}], 0);
  told(said);
});
"""
"""A session is looked at while it has an owner, has lost it, is being taken over, and has another one."""


def test_a_takeover_is_told_once_with_both_owners_however_it_is_looked_at(page: Any):
    assert page.execute_async_script(TAKEN_OVER) == ["Session trip: owner a to b, epoch 1.1 to 2.1."]


def test_whatever_a_session_says_is_text(page: Any, url: str):
    """A name cannot hold all of it, but a message can, and what a model writes."""
    use_key(page, "text")
    headers = {"authorization": "Bearer text", "x-session-id": "<b>name</b>"}
    said = {"messages": [{"role": "user", "content": PROBES}], "max_tokens": 4}
    httpx.post(f"{url}/v1/chat/completions", json=said, headers=headers, timeout=30).raise_for_status()
    until(lambda: "<b>name</b>" in tree(page), "the name is shown")
    click(page, "#tree .head")
    until(lambda: PROBES in page.find_element("id", "messages").text, "the message is shown")
    assert page.find_elements("css selector", "main img, #messages b, #tree b") == []


def test_a_refusal_is_shown_and_the_page_goes_on(page: Any):
    use_key(page, "refusal")
    page.find_element("id", "create-name").send_keys("one\n")
    until(lambda: "one" in tree(page), "it is listed")
    page.find_element("id", "create-name").send_keys("one\n")
    until(lambda: "'one' exists" in page.find_element("id", "log").text, "the refusal is told")
    complained = complaints(page)  # Chromium says of every answer that is an error that it is one
    assert complained and all("409" in line for line in complained)


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 390)])
def test_it_is_accessible_in_every_scheme_and_on_a_phone(page: Any, scheme: str, width: int):
    axe = pytest.importorskip("axe_core_python.selenium", reason="needs axe-core-python, which the extra dev brings")
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    if not page.find_elements("css selector", "#messages .round"):
        click(page, "#tree .head") if page.find_elements("css selector", "#tree .head") else say(page, COUNT)
        until(lambda: page.find_elements("css selector", "#messages .round"), "the answer's rounds are shown")
    found = axe.Axe().run(page)
    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []
    assert {"color-contrast", "label", "button-name"} <= {rule["id"] for rule in found["passes"]}
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_is_reached_by_the_keyboard_in_the_order_of_the_page(page: Any):
    page.refresh()
    reached: list[str] = []
    while "send" not in reached and len(reached) < 60:
        page.switch_to.active_element.send_keys(TAB)
        reached.append(page.execute_script("return document.activeElement.id || document.activeElement.className"))
        outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached[-1]
    order = [reached.index(name) for name in ("skip", "key", "create-name", "messages", "ask", "temperature", "send")]
    assert order == sorted(order)
