"""The directory: which replica may become a session's owner, and which stores should hold its copies.

Soft state. What it says is never what keeps two owners apart, which the stores' seals do; it knows where sessions are,
decides when others may take over, and gives out epochs that only rise. It is built again from what stores and replicas
tell it, under a higher incarnation. The shell calls `reconcile` after every message and every second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from deployment.ownership.known_session import KnownSession
from deployment.ownership.known_sessions import KnownSessions
from deployment.ownership.known_stores import KnownStores
from deployment.ownership.liveness import Liveness
from deployment.ownership.messages import (
    Claim,
    CopiesLost,
    Ends,
    Found,
    FromOwner,
    Grant,
    Held,
    Join,
    Joined,
    Known,
    Lost,
    Moved,
    Placed,
    Silent,
    Taken,
    Wait,
)
from deployment.ownership.registry import Registry
from deployment.ownership.words import NEVER, Epoch, Member, Named, Order, SessionKey

REPEAT_SECONDS = 1.0
"""Until an answer shows that a message came."""


Word = Grant | Join | CopiesLost | Moved
"""What a replica must be told."""


class Directory:
    """All sessions of one application. Times are of a monotonic clock; `unix` seconds only make the incarnation.

    `is_first`: the cluster is new; it had no directory before this one."""

    def __init__(self, registry: Registry, unix: float, now: float) -> None:
        self._registry = registry
        self.incarnation = registry.next_incarnation(unix)
        self._may_begin = (self.incarnation, registry.incarnation_before(self.incarnation))
        self.is_first = self.incarnation == registry.first_incarnation()
        self._stores = KnownStores(registry, now)
        self._counter = 0
        self._sessions = KnownSessions()
        self._live = Liveness(now)
        self._durable_ids_known = False
        self._superseded: list[tuple[str, Moved]] = []

    # -------------------------------------------------------------------------------------------- who is there

    def store_here(self, member: Member, index: Iterable[Ends], now: float) -> bool:
        """A store tells all that it holds. False: it is void, and must begin again with a fresh arena."""
        if self._live.is_dead(member.node):
            self._make_void(member, now)
        if not self._registry.may_count(member):
            return False
        for older in self._registry.stores():
            if older.node == member.node and older != member:
                self._make_void(older, now)
        all_known = not self._may_exist(now)
        self._stores.heard(member)
        if not self._live.has_heard(member):
            self._sessions.disturb()  # it may be a better place for any of them
        self._live.store_heard(member, now)
        for ends in index:
            if ends.key in self._sessions or not (all_known and _says_nothing(ends)):
                self._learn(ends)
        return True

    def store_alive(self, member: Member, now: float) -> bool:
        """A store says that it is there. False: it must tell what it holds (`store_here`)."""
        if not self._live.has_heard(member):
            return False
        self._live.store_heard(member, now)
        return True

    def renew(self, replica: str, node: str, reports: Iterable[Held | Grant], now: float) -> None:
        """A replica's lease, what it owns, and which grants it acts upon, be they of an earlier directory."""
        if self._live.renewed(replica, node, now):
            self._sessions.disturb()
        for report in reports:
            if isinstance(report, Held):
                answer = self.hold(report)
                if isinstance(answer, Moved):
                    # Where its stores are void, none is left that would refuse it.
                    self._superseded.append((replica, answer))
            else:
                self._act_upon(report, now)

    def _act_upon(self, grant: Grant, now: float) -> None:
        """A replica acts upon a grant, and has not come to an end with it."""
        if grant.named is None and grant.epoch.incarnation not in self._may_begin:
            self._superseded.append((grant.replica, self._too_old(grant.key)))
            return
        session = self._sessions.learn(grant.key)
        unheard = session.barren and session.granted.get(grant.tenure, NEVER) >= grant.epoch
        if session.pending == grant or unheard:
            session.barren = False  # it has not heard that its copies are lost, nor perhaps that it was granted them
        elif grant.epoch > session.epoch:
            session.pending, session.sent, session.alone = grant, now, grant.alone
            if grant.named is not None and (session.named is None or grant.named.epoch > session.named.epoch):
                session.named, session.tenure = grant.named, None
        elif session.named is not None and (session.named.epoch, session.named.owner) == (grant.epoch, grant.replica):
            session.tenure = grant.tenure  # its set is named, but an older store has not heard of it, and may be void

    def replica_exited(self, replica: str) -> None:
        self._live.exited(replica)

    def node_died(self, node: str, now: float) -> None:
        self._live.node_died(node)
        for member in self._registry.stores():
            if member.node == node:
                self._make_void(member, now)

    def durable_ids(self, ids: Iterable[tuple[SessionKey, Order]]) -> None:
        """The first scan of the durable tier: sessions of which no store may know anything any more, each as of the
        order under which it was last written there. A tombstone that is older is not theirs."""
        for key, order in ids:
            self._sessions.learn(key).ends_at(order, None)
        self._durable_ids_known = True

    # -------------------------------------------------------------------------------------------- questions

    def knows(self, replica: str) -> bool:
        """Whether anything was heard of a replica."""
        return self._live.knows(replica)

    def may_act(self, replica: str, now: float) -> bool:
        """Whether a replica has to be reckoned with, or others may take over from it."""
        return self._live.may_act(replica, now)

    def locate(self, key: SessionKey, now: float) -> Placed | Wait | None:
        """None: there is no such session. Never that while somebody who might know has not answered."""
        self._stores.look(now)
        session = self._sessions.get(key)
        if session is None or session.gone:
            return Wait(key, REPEAT_SECONDS) if session is None and self._may_exist(now) else None
        return self._placed(key, session, now)

    def sessions(self, tenant: str, now: float) -> tuple[Placed, ...]:
        mine = ((key, session) for key, session in self._sessions.items() if key.tenant == tenant)
        return tuple(self._placed(key, session, now) for key, session in mine if not session.gone)

    def unowned(self, beginning: str, now: float) -> tuple[Placed, ...]:
        """Sessions of all tenants whose names begin so, and that no replica owns."""
        named = ((key, session) for key, session in self._sessions.items() if key.session.startswith(beginning))
        placed = (self._placed(key, session, now) for key, session in named if not session.gone)
        return tuple(one for one in placed if one.owner is None)

    def claim(self, claim: Claim, now: float) -> Grant | Taken | Wait | Lost:
        """A replica wants to become a session's owner."""
        self._stores.look(now)
        if self._live.renewed(claim.replica, claim.node, now):
            self._sessions.disturb()
        key, session = claim.key, self._sessions.change(claim.key)
        if session is None:
            return Wait(key, REPEAT_SECONDS) if self._may_exist(now) else self._begin(claim, now)
        unheard = self._stores.unheard
        if unheard.intersection(session.suspects) or (session.named is None and unheard):
            return Wait(key, REPEAT_SECONDS)
        given = claim.given is not None and session.named is not None and claim.given == session.named.epoch
        owner = session.owner
        if owner not in (None, claim.replica) and not session.gone and self._live.may_act(owner, now) and not given:
            return Taken(key, owner)
        nothing_left = not self._stores.counting(session.suspects) or session.barren
        if nothing_left or session.founding or session.begins_anew:
            if unheard and not self._is_ours(session):
                return Wait(key, REPEAT_SECONDS)  # a store may know a later set than that which is void
            if session.pending is not None and session.pending.tenure == claim.tenure and not nothing_left:
                self._grant_sound(key, session, now)
                return session.pending
            newest = self._has_newest(claim, session)
            if not (claim.anew or session.gone or newest):
                return Lost(key)
            believed_until = self._stores.believed_until(session.suspects, self._is_ours(session))
            if nothing_left and not newest and now < believed_until:
                return Wait(key, REPEAT_SECONDS)  # its owner was not sealed, and may not know yet that it is none
            alone = claim.alone if session.gone else session.alone
            grant = self._begin(claim, now, anew=True, alone=alone, previous=self._stores.counting(session.suspects))
            founding = isinstance(grant, Grant) and claim.holds is not None and not claim.anew
            self._sessions.learn(key).founding = founding
            return grant
        session.given = given and owner != claim.replica
        members = self._best_set(session)
        if session.gone:  # whatever it was, it is another one from now on
            session.alone = claim.alone
        if session.alone:
            members = (min(members, key=lambda member: member.node != claim.node),)
        return self._grant(key, session, claim.replica, claim.tenure, members, now)

    # -------------------------------------------------------------------------------------------- owners

    def told(self, message: FromOwner, now: float) -> Known | Moved | None:
        """What an owner says, and what it must hear of that at once."""
        match message:
            case Held():
                return self.hold(message)
            case Silent():
                self.silence(message, now)
            case Found():
                self.found(message, now)
            case Joined():
                self.joined(message, now)
        return None

    def hold(self, held: Held) -> Known | Moved:
        if held.begins and held.epoch.incarnation not in self._may_begin:
            return self._too_old(held.key)
        session = self._sessions.learn(held.key)
        others = session.pending is not None and session.pending.tenure != held.tenure
        fence = session.epoch if held.begins and others else session.fence
        if held.epoch < fence:
            return Moved(held.key, fence)
        session.named_is(Named(held.epoch, held.members, held.replica, held.alone), held.tenure)
        session.granted = {tenure: epoch for tenure, epoch in session.granted.items() if epoch > held.epoch}
        session.ends_at(held.end, held.deleted)
        session.barren = session.founding = False
        if session.pending is not None and session.pending.epoch <= held.epoch:
            session.pending, session.given = None, False
        return Known(held.key, held.epoch)

    def _too_old(self, key: SessionKey) -> Moved:
        """To who would begin a session under a grant of an earlier directory than the last one, which may have granted
        it to somebody else without knowing of that: neither need seal a store that the other one writes to."""
        return Moved(key, Epoch(self.incarnation, 0))

    def silence(self, silent: Silent, now: float) -> None:
        """An owner hears nothing of a store: it is given up, and others are granted."""
        session = self._sessions.change(silent.key)
        if session is None or silent.epoch < (session.named.epoch if session.named else NEVER):
            return
        if self._stores.counting([silent.member]):
            self._give_up(silent.member, now)
            return
        pending, named = session.pending, session.named
        theirs = named is not None and silent.epoch == named.epoch and session.tenure is not None
        if theirs and pending is not None and pending.tenure != session.tenure:
            session.pending, session.given = None, False  # whoever it was offered to has not taken it
        if session.pending is None or silent.member in (*session.pending.previous, *session.pending.members):
            self._grant_again(silent.key, session, now)
        else:
            session.sent = float("-inf")

    def found(self, found: Found, now: float) -> None:
        """What a replica saw when it sealed: a later set than we knew, or that nothing is left."""
        session = self._sessions.change(found.key)
        if session is None or session.pending is None or found.epoch != session.pending.epoch:
            return
        if found.named is not None and (session.named is None or found.named.epoch > session.named.epoch):
            session.named_is(found.named, None)
            session.alone = found.named.alone  # the grant was given without knowing it
        if found.barren:
            session.pending, session.given, session.barren = None, False, True
        else:
            self._grant_again(found.key, session, now)

    def joined(self, joined: Joined, now: float) -> None:
        session = self._sessions.change(joined.key)
        if session is None or session.named is None or joined.epoch != session.named.epoch or session.pending:
            return
        if session.tenure is not None and not self._stores.any_void(joined.members):
            self._grant(joined.key, session, session.named.owner, session.tenure, joined.members, now)
            session.sent = float("-inf")

    # -------------------------------------------------------------------------------------------- what follows

    def reconcile(self, now: float) -> list[tuple[str, Word]]:
        """What replicas must be told now, again where nothing shows that they heard it."""
        self._stores.look(now)
        for member in self._live.silent_stores(now):
            self._give_up(member, now)
        messages: list[tuple[str, Word]] = [*self._superseded]
        self._superseded.clear()
        if not self._may_exist(now):
            self._sessions.forget_gone(now)
        for key, session in self._sessions.restless(now):
            if now - session.sent < REPEAT_SECONDS:
                continue
            if session.suspects and not self._stores.counting(session.suspects):
                messages += self._copies_lost(key, session, now)
                self._sessions.rests(key)
                continue
            self._grant_sound(key, session, now)
            message = session.pending or self._wanted_join(key, session, now)
            replica = session.pending.replica if session.pending else session.owner
            session.sent = now
            if message is not None and replica is not None and self._live.may_act(replica, now):
                messages.append((replica, message))
            elif not self._stands_on_void(session):
                self._sessions.rests(key)
        return messages

    def _stands_on_void(self, session: KnownSession) -> bool:
        """Whether what holds now names a store that counts for nothing, while others still count."""
        if session.pending is not None:
            current = (*session.pending.previous, *session.pending.members)
        else:
            current = session.named.members if session.named else ()
        return self._stores.any_void(current) and bool(self._stores.counting(session.suspects))

    def _copies_lost(self, key: SessionKey, session: KnownSession, now: float) -> list[tuple[str, CopiesLost]]:
        """To all who may still wait for a receipt; once, since one that has not heard it reports the session again."""
        if session.barren:
            return []
        session.sent, session.barren = now, True
        waiting: dict[str, Epoch] = {}
        if session.named is not None:
            # What it was granted since may have been given to somebody else, which it need not have heard.
            since = session.granted.get(session.tenure or "", NEVER)
            waiting[session.named.owner] = max(session.named.epoch, since)
        if session.pending is not None:
            waiting[session.pending.replica] = session.pending.epoch
        return [(who, CopiesLost(key, epoch)) for who, epoch in waiting.items() if self._live.may_act(who, now)]

    def _has_newest(self, claim: Claim, session: KnownSession) -> bool:
        """Whether what the claiming replica still has is what was published last: it has named its set under a grant
        of this directory, and nobody else was granted the session since."""
        named = session.named
        if named is None or session.tenure is None or not self._is_ours(session):
            return False
        alone = session.granted.keys() <= {session.tenure}
        return alone and (named.owner, named.epoch) == (claim.replica, claim.holds)

    def _is_ours(self, session: KnownSession) -> bool:
        """Whether the last set that is known was named under a grant of this directory, so that there is no later one
        that it does not know of."""
        return session.named is not None and session.named.epoch.incarnation == self.incarnation

    def _grant_sound(self, key: SessionKey, session: KnownSession, now: float) -> None:
        """A grant that names a store which is void by now is given anew."""
        if self._stands_on_void(session):
            self._grant_again(key, session, now)

    def _grant_again(self, key: SessionKey, session: KnownSession, now: float) -> None:
        """A new epoch for whoever acts for the session, if anybody does, over what still counts."""
        if session.named is None and self._stores.unheard:
            return  # one that has not answered may know a set
        if session.pending is not None and self._live.may_act(session.pending.replica, now):
            replica, tenure = session.pending.replica, session.pending.tenure
        elif session.named is not None and self._live.may_act(session.named.owner, now) and session.tenure is not None:
            replica, tenure = session.named.owner, session.tenure
            session.given = False
        else:
            return
        if self._stores.counting(session.suspects):
            self._grant(key, session, replica, tenure, self._best_set(session), now)
            session.sent = float("-inf")

    def _wanted_join(self, key: SessionKey, session: KnownSession, now: float) -> Join | None:
        """The owner's node should hold a copy, and a second one where there is one, unless the first is to be alone."""
        if session.named is None or session.barren:
            return None
        members = session.named.members
        wanted = self._choose(key, self._live.node_of(session.named.owner), members, session.copies)
        joiners = [member for member in wanted if member not in members]
        if not joiners:
            return None
        kept = [member for member in wanted if member in members] or list(self._stores.counting(members))
        return Join(key, session.named.epoch, joiners[0], (joiners[0], *kept)[: session.copies])

    # -------------------------------------------------------------------------------------------- grants and sets

    def _begin(
        self,
        claim: Claim,
        now: float,
        anew: bool = False,
        alone: bool | None = None,
        previous: tuple[Member, ...] = (),
    ) -> Grant | Wait:
        """`alone` None: as the claim wants it. `previous`: stores where somebody may still begin it who was granted
        that before."""
        session = KnownSession(alone=claim.alone if alone is None else alone)
        members = self._choose(claim.key, claim.node, (), session.copies)
        if not members:
            return Wait(claim.key, REPEAT_SECONDS)
        self._sessions.replace(claim.key, session)
        grant = self._grant(claim.key, session, claim.replica, claim.tenure, members, now, anew, previous)
        session.begins = grant.epoch
        return grant

    def _grant(
        self,
        key: SessionKey,
        session: KnownSession,
        replica: str,
        tenure: str,
        members: tuple[Member, ...],
        now: float,
        anew: bool = False,
        previous: tuple[Member, ...] = (),
    ) -> Grant:
        self._counter += 1
        epoch = Epoch(self.incarnation, self._counter)
        session.granted[tenure] = epoch
        previous = previous or self._stores.counting(session.suspects)
        anew = anew or session.begins_anew  # until somebody has done so
        session.pending = Grant(key, epoch, replica, tenure, previous, members, session.named, anew, session.alone)
        session.sent = now
        return session.pending

    def _best_set(self, session: KnownSession) -> tuple[Member, ...]:
        named = self._stores.counting(session.named.members) if session.named else ()
        pending = self._stores.counting(session.pending.members) if session.pending else ()
        return named or pending or self._stores.counting(session.suspects)

    def _choose(self, key: SessionKey, node: str | None, prefer: Collection[Member], copies: int) -> tuple[Member, ...]:
        """The store of `node`, then those that hold copies already, then by rendezvous of session and node."""

        def rank(member: Member) -> tuple[bool, bool, bytes]:
            weight = hashlib.sha256(f"{key.tenant}/{key.session}/{member.node}".encode()).digest()
            return member.node != node, member not in prefer, weight

        return tuple(sorted(self._live.stores(), key=rank)[:copies])

    # -------------------------------------------------------------------------------------------- stores

    def _give_up(self, member: Member, now: float) -> None:
        """Makes a silent store void; never the last one of a session's set, since who was to join may be unfinished."""
        for session in self._sessions.values():
            if session.named and not session.gone and self._stores.counting(session.named.members) == (member,):
                return
        self._make_void(member, now)

    def _make_void(self, member: Member, now: float) -> None:
        self._stores.make_void(member, now)
        self._live.forget_store(member)
        self._sessions.lose(member)

    def _may_exist(self, now: float) -> bool:
        """A session of which nothing is known. Who owned one that only void stores had may publish for a while yet."""
        waits = bool(self._stores.unheard) or not self._durable_ids_known
        return waits or now < self._stores.believed_until((), all_known=False)

    def _learn(self, ends: Ends) -> None:
        """What a store holds of one session."""
        if ends.named is None and not ends.history.runs:
            return
        session = self._sessions.learn(ends.key)
        if ends.seal < session.begins:
            return
        session.ends_at(ends.history.end, ends.history.end.epoch if ends.deleted else None)
        if ends.named is not None and (session.named is None or ends.named.epoch > session.named.epoch):
            session.named_is(ends.named, None)
            session.barren = False

    def _placed(self, key: SessionKey, session: KnownSession, now: float) -> Placed:
        owner = session.owner if session.owner and self._live.may_act(session.owner, now) else None
        return Placed(key, session.epoch, owner, self._stores.counting(session.suspects), session.alone)


def _says_nothing(ends: Ends) -> bool:
    """Of a session that is not known where all are: it was deleted long ago, or the store was to join it then."""
    return ends.deleted or ends.named is None
