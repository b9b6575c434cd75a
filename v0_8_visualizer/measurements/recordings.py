"""The recordings that the site plays: `python -m v0_8_visualizer.measurements.recordings`.

    batching      six questions that come one after another, and a long prompt among them that is computed in chunks
    preemption    five questions in a pool so small that some lose their blocks
    sharing       four questions behind one beginning, one of them with three answers; n-grams are guessed

Real runs of the default model. The wall clock is in them, so each is a little different; what they show is not, and is
asserted. They go to docs/recordings/, as the server's `GET /events/recording` would say them.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import loading
from common.measuring.recipe import ROOT
from common.sampling_params import SamplingParams
from common.weights import resolve

from ..engine import LLMEngine
from ..events import TimedEvents, numbered
from ..pace import Pace
from ..snapshot import begins_with, take_snapshot

FOLDER = ROOT / "docs" / "recordings"
LONG = (
    "Here is a list of rules for a library. Books may be kept for three weeks. A book that nobody waits for may be "
    "kept for three weeks more. Whoever brings a book back late pays ten cents for each day. Food and drinks stay "
    "outside. Dogs wait at the door, unless they guide somebody. Telephones are silent in the reading room. Newspapers "
    "are read here and not taken home. Children below the age of ten come with somebody older. The copier costs five "
    "cents for each page. Bags are left in the lockers, which take a coin and give it back. The library is closed on "
    "Mondays and on holidays. "
)
SYSTEM = (
    "You answer questions about the planets of the solar system. Answer in one short sentence, in plain words, without "
    "a list. If a question has nothing to do with planets, say so. The planets are Mercury, Venus, Earth, Mars, "
    "Jupiter, Saturn, Uranus and Neptune. Use the metric system. "
)
Request = tuple[int, str, str | None, SamplingParams]  # the step before which it comes, question, system prompt, params


class Recorder:
    """Listens, and keeps every message as a line."""

    def __init__(self, engine: LLMEngine, model: str) -> None:
        self.start, self.num_events = time.perf_counter(), 0
        about = {"reason": "recorded", "milestone": "v0.8", "model": model}
        first = begins_with(take_snapshot(engine), 0, 0.0, Pace(), about, {"allow_control": False})
        self.lines = [json.dumps(first)]
        self.types: Counter[str] = Counter()
        engine.events.subscribe(self)

    def on_events(self, events: TimedEvents) -> None:
        """Listener."""
        for moment, event in events:
            self.lines.append(json.dumps(numbered(self.num_events, moment - self.start, event)))
            self.types[event.type] += 1
            self.num_events += 1

    def on_reset(self) -> None:
        """Listener: no step fails here."""
        raise AssertionError("a step was cut short")


def main() -> None:
    """Make all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: the folder that the site shows")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = resolve(None)
    name = folder.name.rpartition("-")[0]
    model, tokenizer = loading.load(folder, None, device="cpu", dtype="float32")

    def record(file: str, requests: Sequence[Request], expected: Sequence[str], **options: Any) -> None:
        engine = LLMEngine(model, tokenizer=tokenizer, max_model_len=600, **options)
        recorder = Recorder(engine, name)
        run(engine, requests)
        missing = [type_ for type_ in expected if not recorder.types[type_]]
        assert not missing, f"{file} does not show {missing}"
        path = args.out / f"{file}.jsonl"
        path.write_text("\n".join(recorder.lines) + "\n")
        print(f"{path.name}: {engine.num_steps} steps, {recorder.num_events} events, {path.stat().st_size >> 10} KiB")

    greedy = SamplingParams(temperature=0.0, max_tokens=28)
    questions = ["Why is the sky blue?", "What is a prime number?", "Name three rivers.", "Who wrote Hamlet?"]
    record(
        "batching",
        [
            *((3 * index, question, None, greedy) for index, question in enumerate(questions)),
            (12, LONG + "When is the library closed?", None, greedy),
            (14, "What is rain? 🌧️", None, greedy),
        ],
        ["prefill_chunk", "first_token", "decode", "request_finished"],
        num_blocks=48,
        max_num_batched_tokens=48,
    )
    longer = SamplingParams(temperature=0.0, max_tokens=44)
    record(
        "preemption",
        [(2 * index, question, None, longer) for index, question in enumerate([*questions, "What is a cloud?"])],
        ["request_preempted", "block_evicted"],
        num_blocks=16,
        max_num_batched_tokens=96,
    )
    planets = ["Which planet is the largest?", "Which planet has rings?", "Name the planets in order."]
    seeded = SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=24)
    record(
        "sharing",
        [
            (0, planets[0], SYSTEM, greedy),
            *((3, question, SYSTEM, SamplingParams(temperature=0.0, max_tokens=40)) for question in planets[1:]),
            (8, "Which planet is the closest to the sun?", SYSTEM, seeded),
        ],
        ["block_shared", "block_copied", "request_forked", "speculative_round"],
        num_blocks=48,
        max_num_batched_tokens=64,
        speculative_method="ngram",
        num_speculative_tokens=4,
    )


def run(engine: LLMEngine, requests: Sequence[Request]) -> None:
    """Let each request come before its step, and step to the end."""
    waiting = sorted(enumerate(requests), key=lambda entry: entry[1][0])
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][1][0] <= engine.num_steps or not engine.has_unfinished_requests()):
            index, (_, question, system, params) = waiting.pop(0)
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": question})
            token_ids = engine.tokenizer.chat_token_ids(messages)
            engine.add_request(f"{'ABCDEFGH'[index]}", question, params, prompt_token_ids=token_ids)
        engine.step()


if __name__ == "__main__":
    main()
