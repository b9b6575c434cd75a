"""Loads in which prompts begin alike: who asks what, one turn after the other. Torch-free.

    chats             each user in a conversation of 6 turns: a prompt is all that was said before, and a question
    system prompts    4 short questions of each user, every one behind one of half as many long system prompts as users

Questions and answers are half as long to half as long again as their mean. With equal ones, users who begin together
would ask together for ever, and wait for each other. `routing.py` asks real replicas, `simulation.py` simulated ones.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_USERS = 8  # where they are measured
NUM_BLOCKS = 400  # of a replica's pool: it holds half of what these loads have in common, but not all of it


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's next question: `start` and `new`, or what was said so far and `new` where there is no `start`."""

    start: Sequence[int] | None
    new: Sequence[int]
    num_tokens: int  # of the answer

    def prompt(self, said: Sequence[int]) -> list[int]:
        """Its tokens, behind what was said."""
        return [*(said if self.start is None else self.start), *self.new]


Session = list[Turn]  # one user's: each turn is asked when the answer to the one before is complete


def chats(seed: int, num_users: int, *, num_turns: int = 6, num_new: int = 40, num_tokens: int = 160) -> list[Session]:
    """Conversations, which have nothing in common with each other."""
    rng = random.Random(seed)
    return [[_turn(rng, None, num_new, num_tokens) for _ in range(num_turns)] for _ in range(num_users)]


def system_prompts(seed: int, num_users: int, *, num_questions: int = 4, num_common: int = 2000) -> list[Session]:
    """Short questions behind a few long system prompts, in any order."""
    rng = random.Random(seed)
    prompts = [_ids(rng, num_common) for _ in range(num_users // 2)]
    return [[_turn(rng, rng.choice(prompts), 30, 32) for _ in range(num_questions)] for _ in range(num_users)]


WORKLOADS: dict[str, Callable[[int, int], list[Session]]] = {"chats": chats, "system prompts": system_prompts}


def _turn(rng: random.Random, start: Sequence[int] | None, num_new: int, num_tokens: int) -> Turn:
    """With these means."""
    new, tokens = (rng.randint(mean // 2, mean * 3 // 2) for mean in (num_new, num_tokens))
    return Turn(start, _ids(rng, new), tokens)


def _ids(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(100, 40000) for _ in range(number)]
