"""One process of a node, until it is killed. Arguments: DIRECTORY, and what it is.

store     opens the arena, appends numbered records without end and says each number; before that it reserves room for
          a document of a writer, and says its incarnation and the reservation's place and generation
writer    INCARNATION PLACE GENERATION: writes into that reservation again and again, and says so once
"""

from __future__ import annotations

import sys
from pathlib import Path

from state.arena_view import ArenaView
from state.stored import Reservation, StoredDocument
from tests.state.arenas import APPLICATION, KEY, NODE, open_small, order

SIZE = 1 << 24
DOCUMENT_BYTES = 1 << 20
WRITER = "engine"


def reservation(place: int, generation: int) -> Reservation:
    return Reservation(StoredDocument(KEY, order(1), (64,), DOCUMENT_BYTES, place), WRITER, generation)


def record(number: int) -> bytes:
    return f"record {number} ".encode() * (number % 40)


def store(directory: Path) -> None:
    arena = open_small(directory, SIZE)
    made = arena.reserve(WRITER, KEY, order(1), (64,), DOCUMENT_BYTES)
    print(arena.incarnation, made.document.place, made.generation, flush=True)
    number = 0
    while True:
        arena.append(KEY, [record(number), record(number + 1)])
        number += 2
        print(number, flush=True)
        if number % 600 == 0:
            arena.trim(KEY, len(arena.records(KEY)) - 50)


def writer(directory: Path, incarnation: str, place: str, generation: str) -> None:
    view = ArenaView(APPLICATION, NODE, incarnation, writable=True, directory=directory)
    room = view.write(reservation(int(place), int(generation)))
    for number in range(1 << 30):
        room[:] = bytes([number % 256]) * DOCUMENT_BYTES
        if number == 0:
            print("writing", flush=True)


if __name__ == "__main__":
    {"store": store, "writer": writer}[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
