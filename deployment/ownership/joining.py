"""How does a store join a session's set while its owner writes on? It gets image and log first, and is named after."""

from __future__ import annotations

from deployment.ownership.messages import FromStore, Gap, Join, Joined, Kept, Part, Read, Receipt, Refused
from deployment.ownership.recovery import Repair, installation
from deployment.ownership.sending import DIRECTORY, Links, Send
from deployment.ownership.words import Member

REPEAT_SECONDS = 1.0


class Joining:
    """The directory's wish, acted upon. What the owner appends meanwhile, the new grant's takeover brings."""

    def __init__(self, join: Join, source: Member) -> None:
        self.join = join
        self.failed = False
        self._source = source
        self._links = Links()
        self._part: Part | None = None
        self._repair: Repair | None = None
        self._told = float("-inf")

    def begin(self, now: float) -> list[Send]:
        return [self._links.ask(self._source, Read(self.join.key, self.join.epoch, None), now)]

    def received(self, answer: FromStore, now: float) -> list[Send]:
        if isinstance(answer, Part) and answer.member == self._source and answer.after is None and self._part is None:
            self._part = answer
            self._repair = installation(self.join.joiner, self.join.epoch, answer)
            self._links.answered(answer.member)
            return [self._links.ask(self.join.joiner, self._repair.message(answer), now)]
        if answer.member != self.join.joiner or self._repair is None or self._part is None:
            return []
        if isinstance(answer, Gap | Refused):
            self.failed = True  # its source has let go of the image meanwhile, or it is not the owner's any more
        elif isinstance(answer, Receipt | Kept) and self._repair.accept(answer):
            self._links.answered(answer.member)
            if not self._repair.done:
                return [self._links.ask(answer.member, self._repair.message(self._part), now)]
            return self.tick(now)
        return []

    def tick(self, now: float) -> list[Send]:
        if self._links.silent(now):
            self.failed = True
            return []
        if self._repair is not None and self._repair.done and now - self._told >= REPEAT_SECONDS:
            self._told = now
            return [Send(DIRECTORY, Joined(self.join.key, self.join.epoch, self.join.members))]
        return self._links.repeat(now)
