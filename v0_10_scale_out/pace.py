"""How fast an engine steps when somebody watches: at once, with pauses, or only as often as it is told. Torch-free."""

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Pace:
    """As fast as it can, unless told otherwise.

    `delay` is in seconds, from the beginning of a step to that of the next. `num_steps` may be made though it is
    paused. `next_time` is when the next one may begin, by `time.monotonic()`.
    """

    paused: bool = False
    delay: float = 0.0
    num_steps: int = 0
    next_time: float = 0.0

    def changed(self, paused: bool | None, delay: float | None, num_steps: int) -> "Pace":
        """The pace after somebody has turned these; `None` leaves one as it is."""
        paused = self.paused if paused is None else paused
        delay = self.delay if delay is None else delay
        return Pace(paused, delay, self.num_steps + num_steps if paused else 0, min(self.next_time, _now() + delay))

    def seconds_left(self) -> float | None:
        """Until the next step: 0 is now, `None` is not before something changes."""
        if self.paused:
            return 0.0 if self.num_steps else None
        return max(0.0, self.next_time - _now())

    def stepped(self) -> "Pace":
        """The pace when a step begins."""
        return replace(self, num_steps=max(0, self.num_steps - 1), next_time=_now() + self.delay)


def _now() -> float:
    return time.monotonic()
