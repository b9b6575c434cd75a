"""v0.10's own server and engine, without Ray, keep these promises; see `tests/contracts`."""

from tests.contracts import promises

globals().update(promises("v0_10"))
