"""`GET /metrics` over HTTP: turns, refusals and sessions show on it, and nothing that a client said."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployment.errors import RequestError
from deployment.metrics import catalog
from tests.deployment import serving as harness
from tests.deployment.serving import serving

MARK = "zanzibar"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": f"Count from 3 to 9, {MARK}."}], "max_tokens": 12, "temperature": 0,
    "ignore_eos": True,
}  # fmt: skip
HEADERS = {"x-session-id": f"{MARK}-session", "authorization": f"Bearer {MARK}-key"}

Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(url: str) -> tuple[str, Samples]:
    response = httpx.get(f"{url}/metrics", timeout=20)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return response.text, samples


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for has, value in samples.get(name, []) if labels.items() <= has.items())


def test_a_scrape_shows_what_was_asked_and_drawn_and_refused_and_no_word_of_it():
    with serving() as url, httpx.Client(base_url=url, headers=HEADERS, timeout=30) as client:
        answer = client.post("/v1/chat/completions", json=BODY)
        streamed = client.post("/v1/chat/completions", json={**BODY, "stream": True})
        assert answer.is_success and streamed.is_success
        assert client.post("/v1/chat/completions", json={**BODY, "model": MARK}).status_code == 404
        message = {"messages": BODY["messages"], "max_tokens": 12, "model": MARK}
        assert client.post("/v1/messages", json=message).status_code == 404
        assert client.get(f"/v1/sessions/{MARK}").status_code == 404
        text, samples = scrape(url)
        _, again = scrape(url)
    rounds = answer.json()["meta_info"]["rounds"]
    assert MARK not in text and HEADERS["authorization"].split()[1] not in text
    assert total(samples, "dflash_replicas") == 1 and total(samples, "dflash_host_store_bytes", node="x") == 4096
    assert total(samples, "dflash_acceptance_length_tokens_count", replica="a") == 2 * len(rounds)
    assert total(samples, "dflash_acceptance_length_tokens_sum") == 2 * sum(number + 1 for number in rounds)
    accepted = [total(samples, "dflash_drafts_accepted_total", position=str(place)) for place in range(1, 9)]
    assert accepted == [2 * sum(number >= place for number in rounds) for place in range(1, 9)]
    verified = [total(samples, "dflash_drafts_verified_total", position=str(place)) for place in range(1, 9)]
    assert all(more >= some for more, some in zip(verified, accepted, strict=True))
    assert total(samples, "dflash_tokens_committed_total") == 24
    assert total(samples, "dflash_turns_answered_total", reason="length") == 2
    assert total(samples, "dflash_turns_started_total", hit="none") == 1
    assert total(samples, "dflash_turns_started_total", hit="device") == 1
    assert total(samples, "dflash_time_to_first_token_seconds_count", hit="device") == 1
    assert total(samples, "dflash_inter_chunk_seconds_count") >= 2
    assert total(samples, "dflash_refusals_total", reason="model_not_found", when="before") == 2
    assert total(samples, "dflash_refusals_total", reason="session_not_found") == 1
    assert total(samples, "dflash_tier_bytes_total", tier="host", direction="out") > 1000
    assert total(samples, "dflash_sessions") == 1 and total(samples, "dflash_lanes") == 4
    for family in (family for family in catalog.ALL if family.kind == "counter"):
        assert total(again, family.name) >= total(samples, family.name), f"{family.name} went back"


def test_a_scrape_of_replicas_that_do_not_answer_says_that_there_are_none(monkeypatch: pytest.MonkeyPatch):
    async def silent(self: Any) -> list[Any]:
        raise RequestError(503, "unavailable", "the replicas do not answer")

    monkeypatch.setattr(harness._Replicas, "measured", silent)
    with serving() as url:
        httpx.post(f"{url}/v1/chat/completions", json={"model": MARK}, timeout=20)
        _, samples = scrape(url)
    assert total(samples, "dflash_replicas") == 0 and "dflash_lanes" not in samples
    assert sum(value for _, value in samples["dflash_refusals_total"]) == 1
