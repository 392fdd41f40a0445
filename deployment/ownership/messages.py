"""What directory, host stores and owners say to each other. Any message may be late, lost or come twice.

Who asks a store names the epoch under which it asks; the answer repeats it, so that an owner never takes an answer to
what it asked under another epoch. `member` is the store that answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deployment.ownership.history import History
from deployment.ownership.words import Epoch, Member, Named, Order, SessionKey

# ------------------------------------------------------------------------------------------------ owner to store


@dataclass(frozen=True)
class Look:
    """How does the log stand? Changes nothing. Answer: `Ends`."""

    key: SessionKey
    epoch: Epoch


@dataclass(frozen=True)
class Seal:
    """Nobody below `epoch` may write any more. `anew`: what the copy holds counts for nothing. Answer: `Ends`."""

    key: SessionKey
    epoch: Epoch
    anew: bool = False


@dataclass(frozen=True)
class Read:
    """The numbered records after `after`; None: all that are held. Answer: `Part`."""

    key: SessionKey
    epoch: Epoch
    after: Order | None


@dataclass(frozen=True)
class Append:
    """These records come after the one at `after`. Those that the store has are passed over. Answer: `Receipt`, `Full`,
    `Gap` if it lacks `after`."""

    key: SessionKey
    epoch: Epoch
    after: Order
    records: tuple[bytes, ...]


@dataclass(frozen=True)
class Install:
    """The copy becomes these records, for a store that is to join. Answer: `Receipt`, `Full`."""

    key: SessionKey
    epoch: Epoch
    records: tuple[bytes, ...]


@dataclass(frozen=True)
class NameSet:
    """From now on `members` hold copies, all of which end at `end`. `alone`: see `Named`. Answer: `Receipt`, `Gap` if a
    member does not."""

    key: SessionKey
    epoch: Epoch
    end: Order
    members: tuple[Member, ...]
    owner: str
    alone: bool = False


@dataclass(frozen=True)
class Put:
    """An image as of the record at `order`. Answer: `Kept`, `Gap` if the log does not hold that record, `Full`."""

    key: SessionKey
    epoch: Epoch
    order: Order
    frontiers: tuple[int, ...]
    document: Any


@dataclass(frozen=True)
class Bring:
    """Fetch the image at `order` from the store `source`, then `Put` it. Answer: that of `Put`."""

    key: SessionKey
    epoch: Epoch
    order: Order
    source: Member


@dataclass(frozen=True)
class Trim:
    """All copies hold the image at `image`: older images go, and records before that at `log` (which stays, so that
    the log still says where it begins). Answer: `Receipt`."""

    key: SessionKey
    epoch: Epoch
    image: Order
    log: Order


ToStore = Look | Seal | Read | Append | Install | NameSet | Put | Bring | Trim

# ------------------------------------------------------------------------------------------------ store to owner


@dataclass(frozen=True)
class Image:
    """A document that a store holds, as of the record at `order`."""

    order: Order
    frontiers: tuple[int, ...]


@dataclass(frozen=True)
class Ends:
    """How a copy stands. `images`: those that agree with its log, oldest first. `whole`: log and images are enough to
    rebuild the session. `deleted`: its last record is a tombstone."""

    member: Member
    key: SessionKey
    epoch: Epoch
    seal: Epoch
    named: Named | None
    history: History
    images: tuple[Image, ...]
    whole: bool
    deleted: bool


@dataclass(frozen=True)
class Part:
    member: Member
    key: SessionKey
    epoch: Epoch
    after: Order | None
    records: tuple[bytes, ...]
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Receipt:
    """Done, and it outlives the store's process. The log ends at `end`."""

    member: Member
    key: SessionKey
    epoch: Epoch
    end: Order
    named: Epoch


@dataclass(frozen=True)
class Kept:
    """The image is held."""

    member: Member
    key: SessionKey
    epoch: Epoch
    order: Order


@dataclass(frozen=True)
class Refused:
    """The session is sealed under another epoch than the one that was named."""

    member: Member
    key: SessionKey
    epoch: Epoch
    seal: Epoch


@dataclass(frozen=True)
class Gap:
    """What should come before is not there. Nothing was written; the log ends at `end`."""

    member: Member
    key: SessionKey
    epoch: Epoch
    end: Order


@dataclass(frozen=True)
class Full:
    """There is no room. Nothing was written. In bytes."""

    member: Member
    key: SessionKey
    epoch: Epoch
    wanted: int
    free: int


FromStore = Ends | Part | Receipt | Kept | Refused | Gap | Full

# ------------------------------------------------------------------------------------------------ directory and owner


@dataclass(frozen=True)
class Grant:
    """`replica` may become the owner under `epoch`, once it has sealed `previous` and named `members`.

    `tenure`: the owner machine that claimed the session; no other one acts upon the grant, so that no epoch is ever
    used by two. `previous`: every store, not void, that may hold what was published. `named`: the last set that the
    directory knows of; its members that are not in `previous` are void. `anew`: nothing that is left counts. `alone`:
    see `Named`.
    """

    key: SessionKey
    epoch: Epoch
    replica: str
    tenure: str
    previous: tuple[Member, ...]
    members: tuple[Member, ...]
    named: Named | None = None
    anew: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Claim:
    """`replica`, which lives on `node`, asks for a session, for its owner machine `tenure`.

    `given`: the epoch under which its owner offered it. `anew`: as a new one, if nothing of it is left that counts.
    `holds`: as a new one, since the replica still has all that it wrote under that epoch. `alone`: if there is no such
    session yet, it is to be in one store and nowhere else.
    """

    key: SessionKey
    replica: str
    tenure: str
    node: str
    given: Epoch | None = None
    anew: bool = False
    holds: Epoch | None = None
    alone: bool = False


@dataclass(frozen=True)
class Taken:
    """Another replica is the owner, and nothing says that it is gone."""

    key: SessionKey
    owner: str


@dataclass(frozen=True)
class Wait:
    """The directory does not know enough yet: ask again in `seconds`."""

    key: SessionKey
    seconds: float


@dataclass(frozen=True)
class Lost:
    """No copy that counts is left. A client's full history may begin `anew`."""

    key: SessionKey


@dataclass(frozen=True)
class CopiesLost:
    """Every store that an owner under `epoch` could write to is void: nothing that it appends will have receipts."""

    key: SessionKey
    epoch: Epoch


@dataclass(frozen=True)
class Held:
    """`replica` has named `members` and writes under `epoch`. All of them hold the log up to `end`. `deleted`: it
    is a tombstone, of that epoch. `alone`: see `Named`. `begins`: its grant knew of no set before, and it waits for
    `Known`."""

    key: SessionKey
    epoch: Epoch
    replica: str
    tenure: str
    members: tuple[Member, ...]
    end: Order
    deleted: Epoch | None = None
    alone: bool = False
    begins: bool = False


@dataclass(frozen=True)
class Silent:
    """A store has not answered the owner for `SILENT_SECONDS`, or is not there any more."""

    key: SessionKey
    epoch: Epoch
    member: Member


@dataclass(frozen=True)
class Found:
    """What sealing has shown: a set that the directory did not know of, or (`barren`) that no copy of it is left."""

    key: SessionKey
    epoch: Epoch
    named: Named | None
    barren: bool = False


@dataclass(frozen=True)
class Join:
    """The directory would have `members` hold the copies; `joiner` is the one that holds none yet."""

    key: SessionKey
    epoch: Epoch
    joiner: Member
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Joined:
    """The joiner holds the newest image and the log since: `members` may be named."""

    key: SessionKey
    epoch: Epoch
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Placed:
    """Where a session lives; `owner` None: nobody that is known to be alive. `alone`: see `Named`."""

    key: SessionKey
    epoch: Epoch
    owner: str | None
    members: tuple[Member, ...]
    alone: bool = False


@dataclass(frozen=True)
class Drain:
    """The replica is about to go: its sessions should move to the replicas `to`, none of which is. Empty: there is
    nobody yet."""

    to: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """The directory has taken in that the session's set is named under `epoch`: it begins it with nobody else."""

    key: SessionKey
    epoch: Epoch


FromOwner = Held | Silent | Found | Joined
FromDirectory = Grant | Taken | Wait | Lost | Join | CopiesLost | Known

# ------------------------------------------------------------------------------------------------ owner to owner


@dataclass(frozen=True)
class Offer:
    """The source has stopped at a commit boundary, with all receipts: the destination may claim the session."""

    key: SessionKey
    epoch: Epoch
    source: str


@dataclass(frozen=True)
class Moved:
    """The destination goes on under `epoch`."""

    key: SessionKey
    epoch: Epoch


# ------------------------------------------------------------------------------------------------ owner to its replica


@dataclass(frozen=True)
class Opened:
    """Turns may go on after `end`. `continues`: the replica's own state is the session's, with all that it appended;
    otherwise the session is what `records` and the newest of `images`, which the store `source` has, say, and the
    replica tells its machine (`Owner.loaded`) when it has made its state so."""

    key: SessionKey
    epoch: Epoch
    end: Order
    continues: bool
    records: tuple[bytes, ...]
    images: tuple[Image, ...]
    source: Member | None


@dataclass(frozen=True)
class Committed:
    """All copies hold the records up to `sequence`: what they say may be published."""

    key: SessionKey
    sequence: int


@dataclass(frozen=True)
class Fenced:
    """A higher epoch was found: the replica publishes nothing of the session any more."""

    key: SessionKey
    seal: Epoch


@dataclass(frozen=True)
class Unavailable:
    """What counts is not there, and nothing older will do: `session_unavailable`. `holds`: the last epoch under
    which this replica was the owner, if it was: what it has may be the newest state there is (`Claim.holds`)."""

    key: SessionKey
    reason: str
    holds: Epoch | None = None


@dataclass(frozen=True)
class NoRoom:
    """A copy's store is full, so that publishing waits."""

    key: SessionKey
    member: Member
    wanted: int
    free: int


ToReplica = Opened | Committed | Fenced | Unavailable | NoRoom
