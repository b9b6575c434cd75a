"""v0.9 keeps these promises; see `tests/contracts`."""

from tests.contracts import promises

globals().update(promises("v0_9"))
