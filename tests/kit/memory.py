"""What is still in memory: objects that are watched by weak references, while the garbage collector is off."""

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

from tests.kit.models import Successor


class Watched(Successor):
    """A `Successor` that adds to `watched` itself, each KV cache it is given, and that one's tensor: names, and weak
    references. It fails in every forward that reads a `z`.
    """

    def __init__(self, watched: list[tuple[str, weakref.ref[Any]]]) -> None:
        super().__init__(poison="z")
        self.watched = watched
        self._watch("model", self)

    def forward(self, token_ids, positions, kv_cache, *, rows=None):
        self._watch("kv_cache", kv_cache)
        self._watch("kv", kv_cache.kv)
        return super().forward(token_ids, positions, kv_cache, rows=rows)

    def _watch(self, name, value):
        if (name, weakref.ref(value)) not in self.watched:
            self.watched.append((name, weakref.ref(value)))


@contextlib.contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Only what nothing refers to is freed, at once. Nothing is logged: pytest keeps what is, tracebacks included."""
    logging.disable()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
