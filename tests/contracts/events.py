"""Whoever folds the events into a snapshot knows the engine's state after each step; nobody's answer hangs on it."""

import dataclasses
import json
import logging

import pytest

from common.sampling_params import SamplingParams
from tests.contracts.prefix_caching import answers, drain, greedy, recall_engine, seeded, tokens
from tests.kit.drafters import speculate
from tests.kit.models import Recall, ScriptModel
from tests.kit.tokenizers import byte_tokenizer
from tests.kit.watching import Watcher

SINCE = "v0_8"


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])
def test_events_folded_into_a_snapshot_are_the_state_after_each_step(milestone, watch, caching):
    engine = recall_engine(milestone, num_blocks=14, max_num_batched_tokens=9, enable_prefix_caching=caching)
    watcher = watch(engine)
    engine.add_request("A", tokens(21), seeded(3, 8, n=3))
    engine.step()
    engine.add_request("B", tokens(21), greedy(9))
    engine.add_request("C", tokens(13, seed=1), greedy(12, n=2))
    late = None
    for step in range(200):
        engine.step()
        late = watch(engine) if step == 3 else late  # from here on both agree
        if step == 8:
            engine.abort_request("B")
        if not engine.has_unfinished_requests():
            break
    assert not engine.has_unfinished_requests()
    assert late.follower.messages == watcher.follower.messages[-len(late.follower.messages) :]
    seen = set(watcher.types())
    always = {
        "request_queued",
        "request_admitted",
        "request_forked",
        "prefill_chunk",
        "first_token",
        "decode",
        "request_preempted",
        "request_finished",
        "request_aborted",
        "block_allocated",
        "block_shared",
        "block_copied",
        "block_freed",
        "step",
    }
    assert seen == (always | {"block_cached", "block_evicted"} if caching else always)
    assert watcher.follower.ended == {
        "A/0": "length",
        "A/1": "length",
        "A/2": "length",
        "B/0": "abort",
        "C/0": "length",
        "C/1": "length",
    }


def test_the_text_of_the_events_is_the_answers_and_spaces_and_broken_characters_wait(milestone, watch):
    text = "Grüße 🎈 and  two spaces"
    engine = milestone.LLMEngine(ScriptModel([*text.encode()], 3), tokenizer=byte_tokenizer(), num_blocks=20)
    watcher = watch(engine)
    engine.add_request("A", [1, 2, 3], greedy(len(text.encode())))
    drain(engine)
    parts = watcher.of("first_token", "decode")
    assert "".join(part["text"] for part in parts) == text
    assert [part["type"] for part in parts].index("first_token") == 0
    assert [part["text"] for part in parts][2:4] == ["", "ü"]
    assert all(len(part["token_ids"]) == 1 for part in parts)


def test_speculation_is_told_round_by_round_and_folds_to_the_same_state(milestone, watch):
    engine = recall_engine(milestone, num_blocks=40)
    due = answers(engine, tokens(9), greedy(20))[0]
    watcher = watch(engine)
    speculate(engine, lambda request, index: due[index] if index % 4 else 0, 4)
    engine.add_request("A", tokens(9), greedy(20))
    drain(engine)
    rounds = watcher.of("speculative_round")
    assert len(rounds) > 2
    assert {round_["num_rolled_back"] > 0 for round_ in rounds} == {True, False}
    steps = [row for step in watcher.of("step") for row in step["scheduled"]]
    assert [row["num_draft_tokens"] for row in steps if row["num_draft_tokens"]] == [
        round_["num_draft_tokens"] for round_ in rounds
    ]
    assert sum(len(part["token_ids"]) for part in watcher.of("first_token", "decode")) == 20


def test_a_step_says_its_rows_its_budget_who_was_refused_and_why(milestone, watch):
    engine = recall_engine(milestone, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=8)
    watcher = watch(engine)
    engine.add_request("A", tokens(6), greedy(12))
    engine.add_request("B", tokens(6, seed=1), greedy(6))
    engine.add_request("C", tokens(3, seed=2), greedy(3))
    drain(engine)
    first, second, third, *_ = steps = watcher.of("step")
    row = {"is_decode": False, "num_draft_tokens": 0}
    assert first["scheduled"] == [
        {"request_id": "A/0", "num_tokens": 6} | row,
        {"request_id": "B/0", "num_tokens": 2} | row,
    ]
    assert (first["number"], first["token_budget"], first["refused"], first["refused_reason"]) == (
        0,
        8,
        "C/0",
        "token_budget",
    )
    assert [entry["is_decode"] for entry in second["scheduled"]] == [True, False]
    assert (third["refused"], third["refused_reason"]) == ("C/0", "max_num_seqs")
    assert (third["num_running"], third["num_waiting"]) == (2, 1)
    assert steps[-1]["num_free_blocks"] == 8
    assert all(step[name] >= 0 for step in steps for name in ("schedule_seconds", "update_seconds", "output_seconds"))
    assert all(step["run_seconds"] > 0 for step in steps)


def test_a_preemption_says_for_whom_and_the_queue_waits_for_blocks(milestone, watch):
    engine = recall_engine(milestone, num_blocks=6)
    watcher = watch(engine)
    engine.add_request("A", tokens(8), greedy(12))
    engine.add_request("B", tokens(8, seed=1), greedy(12))
    drain(engine)
    [lost, *_] = watcher.of("request_preempted")
    assert (lost["request_id"], lost["for_request_id"]) == ("B/0", "A/0")
    reasons = [step["refused_reason"] for step in watcher.of("step")]
    assert {"preemption", "blocks"} <= set(reasons)
    at = next(step for step in watcher.of("step") if step["preempted"])
    assert (at["preempted"], at["refused"], at["refused_reason"]) == (["B/0"], "B/0", "preemption")


def test_a_step_that_fails_has_told_nothing_and_whoever_watches_begins_again(milestone, watch):
    engine = recall_engine(milestone, num_blocks=20)
    watcher = watch(engine)
    engine.add_request("A", tokens(8), greedy(6))  # the next step takes a block
    engine.step()
    told = len(watcher.follower.messages)
    engine.model.fails_in = 1
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.step()
    assert (len(watcher.follower.messages), watcher.num_resets) == (told, 1)
    assert watcher.follower.requests["A/0"]["state"] == "preempted"
    assert drain(engine)["A"] == [answers(engine, tokens(8), greedy(6))[0][1:]]


def test_a_request_that_fails_alone_is_aborted_and_the_state_stays_true(milestone, watch):
    engine = recall_engine(milestone, num_blocks=20)
    watcher = watch(engine)
    failed = []
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    engine.add_request("A", tokens(9), greedy(6))
    engine.step()
    run, engine.model_runner.run = engine.model_runner.run, lambda scheduled: 1 / 0
    engine.step()
    engine.model_runner.run = run
    assert failed == ["A"]
    assert watcher.follower.ended == {"A/0": "abort"}
    engine.add_request("B", tokens(9), greedy(6))
    drain(engine)
    assert watcher.follower.ended["B/0"] == "length"


def test_the_cache_reset_is_told_and_nothing_is_cached_after_it(milestone, watch):
    engine = recall_engine(milestone, num_blocks=20)
    watcher = watch(engine)
    engine.add_request("A", tokens(9), greedy(6))
    drain(engine)
    assert len(watcher.follower.cached) == 3
    engine.reset_prefix_cache()
    assert watcher.types()["cache_reset"] == 1
    assert watcher.follower.cached == set()


def test_nobody_listens_and_no_event_is_made(milestone, monkeypatch):
    engine = recall_engine(milestone, num_blocks=20)
    module = Watcher(milestone, engine)
    module.unsubscribe()
    made = []
    for event in vars(module.events).values():
        if isinstance(event, type) and issubclass(event, module.events.Event):
            monkeypatch.setattr(event, "__init__", lambda self, *args: made.append(args))
    engine.add_request("A", tokens(9), greedy(6, n=2))
    assert drain(engine)["A"] == answers(engine, tokens(9), greedy(6, n=2))
    assert made == module.follower.messages == []


def test_a_listener_that_fails_is_logged_and_harms_neither_answers_nor_other_listeners(milestone, caplog):
    engine = recall_engine(milestone, num_blocks=20)

    class Faulty:
        def on_events(self, events):
            raise ValueError("a page's fault")

        on_reset = on_events

    engine.events.subscribe(Faulty())
    watcher = Watcher(milestone, engine)
    engine.add_request("A", tokens(9), greedy(6))
    with caplog.at_level(logging.ERROR):
        assert drain(engine)["A"] == answers(engine, tokens(9), greedy(6))
    assert watcher.follower.ended["A/0"] == "length"
    assert "a page's fault" in caplog.text


def test_every_event_is_documented_frozen_and_can_be_said_in_json(milestone):
    module = Watcher(milestone, recall_engine(milestone)).events
    named = [value for value in vars(module).values() if isinstance(value, type)]
    kinds = [kind for kind in named if issubclass(kind, module.Event) and kind is not module.Event]
    assert len({kind.type for kind in kinds}) == len(kinds) > 15
    for kind in kinds:
        assert kind.__doc__.partition("(")[0] != kind.__name__  # what dataclasses write where nobody has
        event = kind(*(() if field.name == "scheduled" else 1 for field in dataclasses.fields(kind)))
        message = json.loads(json.dumps(module.as_message(event)))
        assert message.pop("type") == kind.type
        assert list(message) == [field.name for field in dataclasses.fields(kind)]
        for name in message:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(event, name, 2)


def test_a_snapshot_tells_the_settings_and_no_more_of_a_long_prompt_than_its_beginning(milestone):
    llm = milestone.LLM(Recall(), tokenizer=byte_tokenizer(), num_blocks=400, block_size=4)
    watcher = Watcher(milestone, llm.engine)
    llm.engine.add_request("A", "x" * 1000, SamplingParams(max_tokens=5))
    snapshot = watcher.take_snapshot(llm.engine)
    assert snapshot["settings"] == {
        "num_blocks": 400,
        "block_size": 4,
        "max_num_batched_tokens": llm.engine.scheduler.max_num_batched_tokens,
        "max_num_seqs": 256,
        "max_model_len": llm.engine.max_model_len,
        "enable_prefix_caching": True,
        "speculative_method": None,
        "num_speculative_tokens": 0,
    }
    [request] = snapshot["requests"]
    assert request["prompt"] == watcher.follower.messages[0]["prompt"] == "x" * 500
    assert (request["num_prompt_tokens"], request["max_tokens"], snapshot["step"]) == (1000, 5, -1)
