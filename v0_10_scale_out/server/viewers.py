"""Those who watch an engine over a WebSocket, and the recording of what they could see.

    engine's thread                                    event loop
    events of a step ──▶ one call_soon_threadsafe ──▶ a number and JSON for each ──▶ every viewer's queue, the recording
    snapshot, when one is needed ───────────────────▶ those viewers who need one

Both ways are one: what is first in the engine's thread is first on the event loop. So a snapshot's `seq` is the number
of the last event before it, and the next message has the next number.

A viewer's queue is bounded. One who reads too slowly loses the whole of it, and begins again with a snapshot; the
engine and the other viewers notice nothing. Nothing is listened to, and nothing recorded, before the first has come.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from ..async_engine import AsyncEngine
from ..events import TimedEvents, numbered
from ..snapshot import begins_with, take_snapshot

MOST_VIEWERS = 32
MOST_WAITING = 20_000  # messages of one viewer: some seconds of a busy engine
CHECK_SECONDS = 1.0  # between looks at whether the engine is still alive


class EngineEndedError(Exception):
    """The engine is dead: there is nothing to watch any more."""


class Viewer:
    """One of them: the messages that it has not been sent yet."""

    def __init__(self) -> None:
        self.messages: deque[str] = deque()
        self.reason: str | None = "connected"  # why it needs a snapshot, if it does: it gets nothing before
        self.changed = asyncio.Event()

    def put(self, message: str) -> bool:
        """Queue a message; false where there was no room, and all that waited is dropped."""
        has_room = len(self.messages) < MOST_WAITING
        if has_room:
            self.messages.append(message)
            self.changed.set()
        else:
            self.messages.clear()
        return has_room


class Viewers:
    """Listens to an engine for all who watch it.

    Args:
        engine: as the server drives it.
        about: what every snapshot says beside the engine's state.
        settings: what its settings say beside the engine's.
        most_recorded: events that the recording may hold; 0 is no recording.
    """

    def __init__(
        self, engine: AsyncEngine, about: dict[str, Any], settings: dict[str, Any], *, most_recorded: int
    ) -> None:
        self.engine, self.about, self.settings = engine, about, settings
        self._most_in_part = -(-most_recorded // 2)
        # Two parts at most, each with a snapshot first: the older goes once the newer is full.
        self._parts: deque[list[str]] = deque(maxlen=2)
        self._viewers: set[Viewer] = set()
        self._num_events = 0
        self._start = time.perf_counter()
        self._is_listening = self._is_asked_for = False

    @property
    def is_full(self) -> bool:
        """Whether no more may watch."""
        return len(self._viewers) >= MOST_VIEWERS

    async def watch(self) -> AsyncGenerator[str, None]:
        """The messages for a new viewer, as JSON, until its reader leaves.

        Raises:
            EngineEndedError: there will be no more.
        """
        viewer = Viewer()
        self._loop = asyncio.get_running_loop()
        self._viewers.add(viewer)
        try:
            if not self._is_listening:
                self._is_listening = True
                self.engine.call_soon(lambda: self.engine.engine.events.subscribe(self))
            self._ask()
            while True:
                while viewer.messages:
                    yield viewer.messages.popleft()
                viewer.changed.clear()
                if not self.engine.is_alive:
                    raise EngineEndedError
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(viewer.changed.wait(), CHECK_SECONDS)
        finally:
            self._viewers.discard(viewer)

    def recording(self) -> list[str]:
        """Messages from the first snapshot that is kept on; none before somebody has watched."""
        return [message for part in self._parts for message in part]

    # The engine's thread.

    def on_events(self, events: TimedEvents) -> None:
        """Listener: these have happened."""
        self._loop.call_soon_threadsafe(self._put_events, events)

    def on_reset(self) -> None:
        """Listener: all may be different now."""
        self._loop.call_soon_threadsafe(self._begin_again)

    def _snapshot(self) -> None:
        snapshot = take_snapshot(self.engine.engine)
        self._loop.call_soon_threadsafe(self._put_snapshot, snapshot, time.perf_counter())

    # The event loop.

    def _ask(self) -> None:
        """Have a snapshot taken, unless one is on its way."""
        if not self._is_asked_for:
            self._is_asked_for = True
            self.engine.call_soon(self._snapshot)

    def _begin_again(self) -> None:
        for viewer in self._viewers:
            viewer.reason = "restarted"
        self._parts.append([])  # what follows is no continuation of what was
        self._ask()

    def _put_events(self, events: TimedEvents) -> None:
        if not self._viewers and not self._most_in_part:
            self._num_events += len(events)
            return
        messages = []
        for moment, event in events:
            messages.append(json.dumps(numbered(self._num_events, moment - self._start, event)))
            self._num_events += 1
        for viewer in self._viewers:
            if viewer.reason is None and not all(map(viewer.put, messages)):
                viewer.reason = "behind"
        if self._parts and self._parts[-1]:
            self._parts[-1] += messages
        if self._needs_snapshot():
            self._ask()

    def _put_snapshot(self, snapshot: dict[str, Any], moment: float) -> None:
        self._is_asked_for = False
        entry = begins_with(
            snapshot, self._num_events, moment - self._start, self.engine.pace, self.about, self.settings
        )
        for viewer in self._viewers:
            if viewer.reason is not None:
                viewer.put(json.dumps(entry | {"reason": viewer.reason}))
                viewer.reason = None
        if self._most_in_part and self._is_part_full():
            if self._parts and not self._parts[-1]:
                self._parts.pop()
            self._parts.append([json.dumps(entry | {"reason": "recorded"})])

    def _needs_snapshot(self) -> bool:
        is_recorded = self._most_in_part > 0
        return any(viewer.reason is not None for viewer in self._viewers) or (is_recorded and self._is_part_full())

    def _is_part_full(self) -> bool:
        return not self._parts or not self._parts[-1] or len(self._parts[-1]) >= self._most_in_part
