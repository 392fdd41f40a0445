"""What a session writes to the durable tier at 27B geometry: new bytes only, and not many beside its KV."""

from __future__ import annotations

from bench.state_sizes import GEOMETRY_27B, TOKEN_BYTES, Traffic, agent, conversation, kv_bytes
from state.geometry import PAGE_TOKENS


def test_a_tool_call_of_a_long_agent_writes_at_most_twice_its_new_kv_on_average() -> None:
    written, new_kv = agent()
    assert new_kv < written <= 2 * new_kv


def test_a_conversations_turn_writes_one_image_and_its_new_pages() -> None:
    written, new_kv = conversation()
    page = GEOMETRY_27B.target_page_bytes
    assert GEOMETRY_27B.image_bytes + new_kv <= written <= GEOMETRY_27B.image_bytes + new_kv + 3 * page


def test_what_is_published_again_without_anything_new_writes_its_ledger_only() -> None:
    traffic = Traffic(GEOMETRY_27B, every=0)
    first = traffic.turn(PAGE_TOKENS * 20, PAGE_TOKENS * 20)
    ledger = TOKEN_BYTES * traffic.frontier
    assert first == kv_bytes(GEOMETRY_27B, traffic.frontier) + 2 * GEOMETRY_27B.image_bytes + ledger
    assert traffic.turn(0, 0) == ledger
