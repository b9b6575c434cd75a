"""Three conversations on two replicas, each of which finds its own cache again: `python -m tools.demo_replicas`.

The conversations take turns, so between two questions to the cook the gardener and the sailor answer theirs. A request
repeats all that was said before in its conversation; what its replica finds in its cache is not computed again.
"""

import argparse
import importlib.util
import json
import signal
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.cli import run
from common.errors import ModelError
from tools.demo_server import running

FLAGS = ["--replicas", "2", "--replica-cpus", "1", "--ray-address", "local", "--host", "127.0.0.1"]
ROW = "{:<8}  {:<4}  {:<7}  {:<6}  {:>18}  {}"
RULES = """Answer in one or two short sentences, clearly and correctly. Use simple words that everybody understands, and
explain a word that is not common. If the answer is a list, name the three most important things. If the answer is a
number, say what it is the number of. If there are several opinions, give the most common one. If the question is about
food, plants or animals, mention what is dangerous about them. If the question is about health, law or money, recommend
to ask an expert. If the question is not clear, choose the most likely meaning and answer that. Always be polite,
helpful and brief, and stay on the topic."""
QUESTIONS = {
    "cook": ["What is bread made of?", "How do I bake it?", "What do I eat with it?"],
    "gardener": ["What do plants need?", "How often do I water them?", "What is compost?"],
    "sailor": ["Why does the wind blow?", "What are waves?", "Why is the sea salty?"],
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: which replica gave it, by which rule it was chosen, and how much of the prompt it found."""

    user: str
    number: int
    replica: str
    rule: str
    num_found: int
    num_tokens: int
    text: str

    def __str__(self) -> str:
        text, found = " ".join(self.text.split()), f"{self.num_found} of {self.num_tokens} tokens"
        beginning = text if len(text) <= 40 else f"{text[:37]}..."
        return ROW.format(self.user, self.number, self.replica, self.rule, found, beginning)


def main(argv: list[str] | None = None) -> int:
    """Start the replicas, talk to them, end them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_replicas", description=__doc__)
    parser.add_argument("--model", help="what the server's --model takes (default: the default model)")
    args = parser.parse_args(argv)
    return run(lambda: _demo(["--model", args.model] if args.model else []))


def _demo(flags: list[str]) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ModelError("Several replicas need Ray: install it with `pip install -e '.[ray]'`.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the replicas must not be left behind
    print("Starting Ray and two replicas, each with the model. This takes 15 seconds or more...", file=sys.stderr)
    with running("v0_10_scale_out", [*FLAGS, "--log-level", "warning", *flags]) as address:
        print("Rule new: no replica knows this beginning. Rule prefix: this one knows the most of it.", file=sys.stderr)
        print("\n" + ROW.format("user", "turn", "replica", "rule", "found in its cache", "answer"), flush=True)
        turns = []
        for turn in _turns(address):
            print(turn, flush=True)
            turns.append(turn)
        print(f"\n{_summary(turns)}\n", flush=True)
        print("Ending the replicas and Ray...", file=sys.stderr)


def _turns(address: str) -> Iterator[Turn]:
    """Everybody's first question, then everybody's second: one at a time, so that it is clear where each one went."""
    # All have the same rules, but behind another first sentence, so no block of one is found by another.
    chats = {user: [{"role": "system", "content": f"You are a helpful {user}. {RULES}"}] for user in QUESTIONS}
    letters: dict[str, str] = {}
    for number in (1, 2, 3):
        for user, chat in chats.items():
            chat.append({"role": "user", "content": QUESTIONS[user][number - 1]})
            before = _routed(address)
            answer = _http(f"{address}/v1/chat/completions", {"messages": chat, "max_tokens": 24, "temperature": 0})
            if len(new := _routed(address) - before) != 1:
                raise ModelError("It is not clear which replica has answered: one of them may have been lost.")
            [(replica, rule)] = new
            text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
            chat.append({"role": "assistant", "content": text})
            letter = letters.setdefault(replica, "ABCDEFGHI"[len(letters)])
            num_found = usage["prompt_tokens_details"]["cached_tokens"]
            yield Turn(user, number, letter, rule, num_found, usage["prompt_tokens"], text)


def _routed(address: str) -> Counter[tuple[str, str]]:
    """How many requests each replica has got by each rule."""
    replicas = _http(f"{address}/replicas")["replicas"]
    return Counter({(each["name"], rule): number for each in replicas for rule, number in each["routed"].items()})


def _http(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as response:
        return json.load(response)


def _summary(turns: list[Turn]) -> str:
    """Two lines; raises `ModelError` where a conversation went from one replica to another."""
    homes = {turn.user: turn.replica for turn in turns}
    if moved := {turn.user for turn in turns if turn.replica != homes[turn.user]}:
        raise ModelError(f"Not every conversation stayed on its replica: {', '.join(sorted(moved))}.")
    later = [turn for turn in turns if turn.number > 1]
    found, tokens = sum(turn.num_found for turn in later), sum(turn.num_tokens for turn in later)
    requests = sorted(Counter(turn.replica for turn in turns).items())
    return (
        f"Each conversation stayed on its replica, where the later turns found {found} of their {tokens} tokens.\n"
        f"Requests: {', '.join(f'{number} to replica {replica}' for replica, number in requests)}."
    )


if __name__ == "__main__":
    sys.exit(main())
