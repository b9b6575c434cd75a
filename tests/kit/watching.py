"""Follows an engine by its events alone, as the page does: the state after each is what a snapshot would say."""

import collections
import importlib
import json
from types import ModuleType
from typing import Any

FIELDS = (  # of a request, in a snapshot
    "state",
    "forked_from",
    "num_output_tokens",
    "num_computed_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "num_draft_tokens",
    "num_accepted_tokens",
    "text",
    "block_table",
)


class Follower:
    """Folds messages into a state, beginning with a snapshot."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.begin(snapshot)

    def begin(self, snapshot: dict[str, Any]) -> None:
        """All that was known is replaced."""
        snapshot = json.loads(json.dumps(snapshot))
        self.step = snapshot["step"]
        self.requests: dict[str, dict[str, Any]] = {request["request_id"]: request for request in snapshot["requests"]}
        self.cached = set(snapshot["cached_blocks"])
        self.ended: dict[str, str] = {}

    def take(self, message: dict[str, Any]) -> None:
        """One message more."""
        self.messages.append(message)
        getattr(self, f"_{message['type']}")(message)

    def assert_equals(self, snapshot: dict[str, Any]) -> None:
        """The state is that of a snapshot, of its requests in this order, too."""
        expected = {request["request_id"]: {name: request[name] for name in FIELDS} for request in snapshot["requests"]}
        assert {id_: {name: request[name] for name in FIELDS} for id_, request in self.requests.items()} == expected
        assert list(self.requests) == list(expected)
        assert (self.step, self.cached) == (snapshot["step"], set(snapshot["cached_blocks"]))

    def owners(self) -> dict[int, set[str]]:
        """Of each owned block."""
        owners: dict[int, set[str]] = {}
        for id_, request in self.requests.items():
            for block in request["block_table"]:
                owners.setdefault(block, set()).add(id_)
        return owners

    def _request_queued(self, message):
        siblings = [id_ for id_, r in self.requests.items() if r["parent_id"] == message["parent_id"]]
        self.requests[message["request_id"]] = dict.fromkeys(FIELDS, 0) | {
            "parent_id": message["parent_id"],
            "num_prompt_tokens": message["num_prompt_tokens"],
            "state": "waiting",
            "forked_from": siblings[0] if siblings else None,
            "text": "",
            "block_table": [],
        }

    def _request_admitted(self, message):
        request = self.requests[message["request_id"]]
        request["state"], request["num_computed_tokens"] = "prefill", message["num_cached_tokens"]

    def _request_forked(self, message):
        assert self.requests[message["request_id"]]["forked_from"] == message["from_request_id"]
        self.requests[message["request_id"]] |= {"forked_from": None, "state": "decode"}

    def _prefill_chunk(self, message):
        request = self.requests[message["request_id"]]
        request["num_computed_tokens"] = message["num_computed_tokens"]
        if request["num_preemptions"] == 0:
            request["num_cached_tokens"] += message["num_cached_tokens"]
        assert 0 < message["num_new_tokens"] <= message["num_computed_tokens"] <= message["num_tokens"]

    def _first_token(self, message):
        assert self.requests[message["request_id"]]["num_output_tokens"] == 0
        assert message["seconds"] > 0
        self._decode(message)

    def _decode(self, message):
        request = self.requests[message["request_id"]]
        request["state"] = "decode"
        request["num_output_tokens"] += len(message["token_ids"])
        request["num_computed_tokens"] = request["num_prompt_tokens"] + request["num_output_tokens"] - 1
        request["text"] += message["text"]

    def _speculative_round(self, message):
        request = self.requests[message["request_id"]]
        request["num_draft_tokens"] += message["num_draft_tokens"]
        request["num_accepted_tokens"] += message["num_accepted_tokens"]
        assert message["num_accepted_tokens"] + message["num_rolled_back"] == message["num_draft_tokens"] > 0

    def _request_preempted(self, message):
        request = self.requests[message["request_id"]]
        assert message["num_blocks"] == len(request["block_table"])
        assert message["num_tokens"] == request["num_computed_tokens"]
        assert message["for_request_id"] in self.requests
        request["state"], request["num_computed_tokens"] = "preempted", 0
        request["num_preemptions"] += 1

    def _request_finished(self, message):
        self.ended[message["request_id"]] = message["reason"]
        assert self.requests.pop(message["request_id"])["block_table"] == []

    def _request_aborted(self, message):
        self.ended[message["request_id"]] = "abort"
        assert self.requests.pop(message["request_id"])["block_table"] == []

    def _block_allocated(self, message):
        assert message["block"] not in self.owners()
        assert message["block"] not in self.cached
        self.requests[message["request_id"]]["block_table"].append(message["block"])

    def _block_shared(self, message):
        self.requests[message["request_id"]]["block_table"].append(message["block"])
        assert len(self.owners()[message["block"]]) == message["ref_count"]

    def _block_copied(self, message):
        assert self.requests[message["request_id"]]["block_table"][-1] == message["target"]
        assert message["source"] in self.owners()  # by another: else nothing would have been copied

    def _block_cached(self, message):
        self.cached.add(message["block"])

    def _block_evicted(self, message):
        assert message["block"] not in self.owners()
        self.cached.remove(message["block"])

    def _block_freed(self, message):
        self.requests[message["request_id"]]["block_table"].remove(message["block"])
        assert len(self.owners().get(message["block"], ())) == message["ref_count"]

    def _cache_reset(self, message):
        self.cached.clear()

    def _pace_changed(self, message):
        pass

    def _step(self, message):
        assert message["number"] == self.step + 1
        self.step = message["number"]
        assert 0 < sum(row["num_tokens"] for row in message["scheduled"]) <= message["token_budget"]


class Watcher:
    """A follower of an engine in this process, which compares itself with a snapshot after each step."""

    def __init__(self, milestone: ModuleType, engine: Any) -> None:
        self.events = importlib.import_module(f"{milestone.__name__}.events")
        self.take_snapshot = importlib.import_module(f"{milestone.__name__}.snapshot").take_snapshot
        self.engine = engine
        self.follower = Follower(self.take_snapshot(engine))
        self.num_resets = 0
        self.unsubscribe = engine.events.subscribe(self)

    def on_events(self, events: Any) -> None:
        for _, event in events:
            self.follower.take(json.loads(json.dumps(self.events.as_message(event))))
        self.follower.assert_equals(self.take_snapshot(self.engine))

    def on_reset(self) -> None:
        self.num_resets += 1
        self.follower.begin(self.take_snapshot(self.engine))

    def types(self) -> dict[str, int]:
        """How many messages of each type have come."""
        return dict(collections.Counter(message["type"] for message in self.follower.messages))

    def of(self, *types: str) -> list[dict[str, Any]]:
        """The messages of these types."""
        return [message for message in self.follower.messages if message["type"] in types]
