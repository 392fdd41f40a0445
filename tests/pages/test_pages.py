"""Every command of README.md and docs/*.md: it runs here, or it says what it needs and its arguments are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployment.api_keys import read_keys, tenant_among, tenant_id
from tests.deployment.serving import serving
from tests.deployment.test_media_turns import Seeing
from tests.pages.blocks import PAGES, ROOT, blocks, inline_commands, written
from tests.pages.programs import command_of
from tests.pages.reading import Tried, named, tried
from tests.pages.shell import Room

ALONE = [page for page in PAGES if not any(block.moves for block in blocks(page))]
"""Those that one replica is enough for; `tests/e2e/two_replicas/test_pages.py` has the others."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Tried]]:
    """What the commands of a page print; a page is tried once."""
    known: dict[str, list[Tried]] = {}

    def told(page: str) -> list[Tried]:
        if page not in known:
            place = tmp_path_factory.mktemp("page")
            seeing = Seeing(tmp_path_factory.mktemp("seeing")).service if page == "docs/media.md" else None
            with serving(seeing) as url:
                known[page] = tried(page, url, place)
        return known[page]

    return told


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is_and_what_it_needs(page: str):
    for block in blocks(page):
        with named(block):
            if block.language == "json":
                assert Tried(block, block.text).answers
            if block.language == "yaml":
                assert yaml.safe_load(block.text)
            if block.language == "sh" and block.needs is None:
                assert "--device cuda" not in block.text, "needs: gpu"


@pytest.mark.parametrize("page", ALONE)
def test_commands_that_need_nothing_more_run(page: str, told: Any):
    assert [one.block for one in told(page)] == [block for block in blocks(page) if block.runs]


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_need_more_are_read_by_who_would_run_them(page: str, tmp_path: Path):
    tried(page, None, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_commands_inside_a_sentence_have_the_options_that_they_are_given(page: str):
    for shown in inline_commands(page):
        command, rest = command_of(shown.split()[1:])
        options = {"--help", *(option for parameter in command.params for option in parameter.opts)}
        assert {word for word in rest if word.startswith("--")} <= options, shown


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_to_headings_that_there_are(page: str):
    for target in re.findall(r"\]\((?!https:)([^)\s]+)\)", written(page)):
        file, _, heading = target.partition("#")
        linked = (ROOT / page).parent / file if file else ROOT / page
        assert linked.exists(), f"{page}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str):
    for file in re.findall(r"`((?:bench|deployment|docs|kernels|model|state|tests)/[\w./]*)`", written(page)):
        assert (ROOT / file).exists(), f"{page}: {file}"


# ------------------------------------------------------------------------------------------------ what they come to


def test_the_other_interfaces_answer_as_their_page_says(told: Any):
    (called,), (scored, encoded, decoded, version), (message,), (second, first) = (
        one.answers for one in told("docs/api.md")
    )
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"])["city"]
    assert [choice["text"] for choice in scored["choices"]] == ["3, 5, 7", "One day"]
    assert scored["choices"][0]["logprobs"]["tokens"] and encoded["count"] == len(encoded["tokens"])
    assert decoded["prompt"] and version["version"]
    assert message["content"][0]["text"] == "3, 4, 5, 6, 7, 8, 9"
    assert "4172" in json.dumps(second["output"]) and second["previous_response_id"] == first["id"]


def test_the_http_page_s_streams_go_on_and_its_repeated_request_is_one_turn(told: Any):
    first, forked, followed, twice, completed = (one.output for one in told("docs/http.md"))
    assert first.startswith("HTTP/1.1 200") and "x-session-resume: hit=none" in first
    assert '"session.checkpoint"' in forked and '"session.forked"' in forked
    rests = followed.split("data: [DONE]\n\n")
    assert len(rests) == 4 and rests[3] == "" and rests[1].startswith(rests[0]) and rests[2].endswith(rests[0])
    assert '"usage"' in rests[1].removeprefix(rests[0]) and "assistant" in rests[2] and "assistant" not in rests[0]
    assert twice == "one turn\n"
    assert json.loads(completed)["usage"]["completion_tokens"] == 8


def test_the_agent_makes_ten_calls_and_each_finds_what_the_one_before_it_had_computed(told: Any):
    *steps, last = told("docs/clients.md")[0].output.splitlines()
    figures = [tuple(map(int, step.split())) for step in steps[:10]]
    assert [step for step, *_ in figures] == list(range(10)) and all(1 <= shelf <= 10 for _, shelf, *_ in figures)
    prompts, cached = [one[2] for one in figures], [one[3] for one in figures]
    assert all(found > before // 2 for before, found in zip(prompts, cached[1:], strict=False)), figures
    assert last


def test_an_image_is_seen(told: Any):
    (answer,) = told("docs/media.md")[0].answers
    assert answer["usage"]["completion_tokens"] > 0


def test_a_file_of_keys_is_made_as_the_page_of_security_says(tmp_path: Path):
    (made,) = [block for block in blocks("docs/security.md") if "printf" in block.text]
    room = Room(tmp_path, None)
    key = room.run(f"{made.text}\nprintf %s $key").output
    assert tenant_among(read_keys(room.place / "keys"), key) == tenant_id("alice")
