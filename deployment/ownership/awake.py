"""How long has somebody been silent, as far as who listens can tell?

What is told to a process that stands still it hears afterwards. Until then it would take all for silent that speak
every second, and give up stores that hold the only copies there are: so silence is counted in time in which it could
hear.
"""

from __future__ import annotations

from dataclasses import dataclass

ASLEEP_SECONDS = 2.0
"""Whoever listens looks at the time every second. If he did not for so long, he stood still."""


@dataclass
class AwakeClock:
    """`looked`: when it was started."""

    looked: float
    _asleep: float = 0.0

    def at(self, now: float) -> float:
        """Seconds without those in which nobody looked. To be asked every second."""
        if now - self.looked > ASLEEP_SECONDS:
            self._asleep += now - self.looked
        self.looked = max(self.looked, now)
        return now - self._asleep
