"""When is an image worth its bytes?"""

from __future__ import annotations

import torch

from state.geometry import StateGeometry
from state.image_policy import LONG_TURN_TOKENS, ImagePolicy, default_min_tokens


def geometry(gdn_layers: int, **more: int) -> StateGeometry:
    facts = {
        "kv_layers": 16, "kv_heads": 4, "kv_head_dim": 256, "gdn_layers": gdn_layers, "gdn_heads": 48,
        "gdn_key_dim": 128, "gdn_value_dim": 128, "conv_channels": 10240, "conv_history": 3, "hidden_size": 5120,
        **more,
    }  # fmt: skip
    return StateGeometry(
        kv_dtype=torch.bfloat16, conv_dtype=torch.bfloat16, hidden_dtype=torch.bfloat16,
        ring_key_dtype=torch.bfloat16, ring_value_dtype=torch.float16, **facts,
    )  # fmt: skip


def test_an_image_of_187_mib_is_worth_512_tokens_and_a_small_one_every_token():
    large = geometry(48, ring_layers=5, window=2048, draft_kv_heads=8, draft_head_dim=128)
    assert large.image_bytes >> 20 == 186
    assert default_min_tokens(large) == 512
    assert default_min_tokens(geometry(2)) == 0


def test_the_derived_least_grows_with_the_image_and_stands_at_whole_pages():
    derived = [default_min_tokens(geometry(layers)) for layers in range(1, 97)]
    assert derived == sorted(derived) and derived[-1] > 512
    assert all(tokens % 64 == 0 for tokens in derived)


def test_exactly_the_least_is_not_worth_an_image_and_one_token_more_is():
    policy = ImagePolicy.of(geometry(48), 512, 100)
    assert not policy.worth(100) and policy.worth(101)
    assert not ImagePolicy.of(geometry(48), 512, 0).worth(0)


def test_the_ladder_has_the_gap_of_a_chunk_at_least_1024_and_more_than_the_least():
    assert ImagePolicy.of(geometry(2), 512, 0).ladder_gap == 1024
    assert ImagePolicy.of(geometry(2), 2048, 0).ladder_gap == 2048
    assert ImagePolicy.of(geometry(2), 512, 4000).ladder_gap == 4001


def test_a_turn_that_decodes_leaves_an_image_every_8192_tokens():
    policy = ImagePolicy.of(geometry(48), 512, None)
    assert (
        not policy.long_turn(LONG_TURN_TOKENS - 1) and policy.long_turn(LONG_TURN_TOKENS) and LONG_TURN_TOKENS == 8192
    )
