"""Which replica may commit to a session, and why nothing published is lost, repeated or contradicted.

Pure code: messages and time in, messages out. `words` and `log` say what there is, `storage` what a host store lies on,
`directory`, `store` and `owner` are the three machines. `docs/sessions.md` tells the protocol.
"""

from deployment.ownership.words import Epoch, Member, Order, SessionKey

__all__ = ["Epoch", "Member", "Order", "SessionKey"]
