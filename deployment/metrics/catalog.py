"""Every metric that there is: its name, type, labels, and what it says.

Labels have few values, all of them the program's own words, but for `replica` and `node`, of which there are as many as
the cluster has: nothing that a client sends, and no session, becomes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Family:
    """`name` as in Prometheus; a counter's ends in `_total`."""

    name: str
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()


def _of_replica(name: str, kind: Kind, about: str, *labels: str) -> Family:
    return Family(name, kind, about, ("replica", *labels))


# ------------------------------------------------------------------------------------------------ what clients see

FIRST_TOKEN = Family(
    "dflash_time_to_first_token_seconds",
    "histogram",
    "From a turn's request, once it was read, to its first text or token; hit says where its state came from.",
    ("hit",),
)
CHUNK_GAP = Family(
    "dflash_inter_chunk_seconds", "histogram", "Between two events of a turn that bring something, after the first."
)
TURNS_OPEN = Family("dflash_turns_open", "gauge", "Turns whose answer is awaited or being read.")
TURNS_ANSWERED = Family(
    "dflash_turns_answered_total", "counter", "Choices that came to their end, by finish reason.", ("reason",)
)
REFUSALS = Family(
    "dflash_refusals_total",
    "counter",
    "Requests that were refused, by the error's code; when: before the answer began, or in the middle of it.",
    ("reason", "when"),
)
REPLICAS = Family("dflash_replicas", "gauge", "Replicas that answered this scrape; without them, their metrics lack.")

# ------------------------------------------------------------------------------------------------ load

REPLICA = _of_replica("dflash_replica_info", "gauge", "1; what a replica is.", "node", "model", "backend")
LANES = _of_replica("dflash_lanes", "gauge", "Turns that can run together.")
LANES_RUNNING = _of_replica("dflash_lanes_running", "gauge", "Turns that run: in prefill, or decoding.")
QUEUED = _of_replica("dflash_turns_queued", "gauge", "Turns that wait for a lane, those that were preempted included.")
PREEMPTED_NOW = _of_replica("dflash_turns_preempted", "gauge", "Turns that gave up their lane and wait for one.")
SESSIONS = _of_replica("dflash_sessions", "gauge", "Sessions that the replica owns.")
LANE_WAIT = _of_replica("dflash_lane_wait_seconds", "histogram", "How long turns waited for a lane.")
PREEMPTIONS = _of_replica("dflash_preemptions_total", "counter", "Lanes that were taken away for another turn.")
ENDED = _of_replica(
    "dflash_turns_ended_total", "counter", "Turns that left the engine: stop, length, cancelled, suspended.", "reason"
)
FAILED = _of_replica("dflash_engine_failures_total", "counter", "Turns and calls that the engine failed.", "code")

# ------------------------------------------------------------------------------------------------ rounds

ROUNDS = _of_replica("dflash_rounds_total", "counter", "Decode rounds of all lanes that decoded then.")
PART_SECONDS = _of_replica(
    "dflash_round_part_seconds_total",
    "counter",
    "Time of the engine's thread in rounds; on a GPU accept waits for all that was launched.",
    "part",
)
ACCEPTANCE = _of_replica(
    "dflash_acceptance_length_tokens",
    "histogram",
    "Tokens that a round licensed for a lane: accepted drafts and one more.",
)
VERIFIED = _of_replica(
    "dflash_drafts_verified_total", "counter", "Drafts that the target verified, by their position in the block.",
    "position",
)  # fmt: skip
ACCEPTED = _of_replica(
    "dflash_drafts_accepted_total", "counter", "Drafts that were accepted, by their position in the block.", "position"
)
TOKENS = _of_replica("dflash_tokens_committed_total", "counter", "Tokens that turns drew, published or not.")

# ------------------------------------------------------------------------------------------------ prompts and state

STARTED = _of_replica(
    "dflash_turns_started_total", "counter", "Turns whose prompt was in, by where their state came from.", "hit"
)
REUSED = _of_replica(
    "dflash_prompt_tokens_reused_total", "counter", "Prompt tokens that were not prefilled, by where their state was.",
    "hit",
)  # fmt: skip
PREFILLED = _of_replica("dflash_prompt_tokens_prefilled_total", "counter", "Tokens that were prefilled.")
PREFILL_SECONDS = _of_replica("dflash_prefill_seconds_total", "counter", "Time in slices of prefill.")
PREFILL_SLICES = _of_replica("dflash_prefill_slices_total", "counter", "Slices of prefill.")
CHECKPOINTS = _of_replica("dflash_checkpoints_total", "counter", "Checkpoints that turns left on the device.", "kind")
EVICTIONS = _of_replica("dflash_sessions_evicted_total", "counter", "Sessions whose state the device let go of.")
PAGES = _of_replica("dflash_device_pages", "gauge", "Pages of the target's K/V on the device, 64 tokens each.")
PAGES_FREE = _of_replica("dflash_device_pages_free", "gauge", "Those of them that nobody holds.")
IMAGES = _of_replica("dflash_device_images", "gauge", "Images on the device: running lanes and checkpoints hold them.")
IMAGES_FREE = _of_replica("dflash_device_images_free", "gauge", "Those of them that nobody holds.")
STAGED = _of_replica("dflash_staged_bytes", "gauge", "State of sessions that are on their way to this replica.")

TRANSFERS = _of_replica(
    "dflash_tier_transfers_total",
    "counter",
    "Pieces of state between the device and a tier (host, durable), out of the device or in.",
    "tier", "direction",
)  # fmt: skip
TIER_BYTES = _of_replica(
    "dflash_tier_bytes_total",
    "counter",
    "What they held; to the durable tier, what was new to it.",
    "tier", "direction",
)  # fmt: skip
TIER_SECONDS = _of_replica(
    "dflash_tier_seconds_total",
    "counter",
    "How long they took; of the host tier, the copy from the device, or the fetch.",
    "tier", "direction",
)  # fmt: skip
HOST_SIZE = Family("dflash_host_store_bytes", "gauge", "Shared memory of a node's host store.", ("node",))
HOST_USED = Family("dflash_host_store_used_bytes", "gauge", "What of it is taken, headers included.", ("node",))

# ------------------------------------------------------------------------------------------------ migration

MIGRATIONS = _of_replica(
    "dflash_migrations_total", "counter", "Sessions that the replica was to give away: moved, or stayed.", "outcome"
)
MIGRATION_BYTES = _of_replica(
    "dflash_migration_bytes_total",
    "counter",
    "State that went ahead of the pause of its turn, and in it.",
    "phase",
)
MIGRATION_SECONDS = _of_replica(
    "dflash_migration_seconds_total", "counter", "From the first word to the destination to the end of it all."
)
MIGRATION_PAUSE = _of_replica(
    "dflash_migration_pause_seconds", "histogram", "How long a session that moved stood at its source."
)

ALL: tuple[Family, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Family))
