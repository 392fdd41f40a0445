"""Replicas that never draw alike, for sessions that ask for it by their name.

Two owners with the same seed draw the same tokens, so a round that was published and drawn again by the next owner
would not be seen. With a salt of its own each replica draws something else, and only the log can make them agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from deployment.engine.commands import Submit
from deployment.engine.events import Event
from deployment.replica import EngineReplica
from deployment.settings import AppArgs

SALTED = "salted-"
"""How the names of such sessions begin."""


class SaltedReplica(EngineReplica):
    def __init__(self, args: AppArgs) -> None:
        super().__init__(args)
        salt = int.from_bytes(hashlib.sha256(self._id.encode()).digest()[:8], "big")
        plain = self._service.turn

        def turn(submit: Submit) -> AsyncGenerator[Event, None]:
            if submit.session is not None and submit.session.rpartition("/")[2].startswith(SALTED):
                submit = replace(submit, sampling=replace(submit.sampling, seed=submit.sampling.seed ^ salt))
            return plain(submit)

        self._service.turn = turn  # pyright: ignore[reportAttributeAccessIssue]
