"""The sampler against a plain reference (a full sort, one row at a time), and against numbers worked out by hand."""

import bisect
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import common.sampling as sampling
from common.sampling import SamplerOutput, sample, uniform
from common.sampling_params import LogitBias, SamplingParams, SamplingState

INF = math.inf
LAST = 1 - 2.0**-53  # the largest number that `uniform` returns: it draws the last token that is left
CRITICAL = {1: 15.1, 3: 21.1, 7: 29.9, 31: 71.1}  # chi-square's 99.99 % point, by degrees of freedom


def state(
    seed: int = 0, *, prompt: Sequence[int] = (), output: Sequence[int] = (), eos: Sequence[int] = (), **params: Any
) -> SamplingState:
    made = SamplingState.create(SamplingParams(**params), [*prompt], [*eos], seed)
    made.output_token_ids += output
    return made


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def log_rows(*probs: Sequence[float]) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log().float()


def draw_with(monkeypatch: pytest.MonkeyPatch, uniforms: Sequence[float]) -> None:
    """The request with seed i draws the i-th number."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: uniforms[seed])


def tokens(logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
    return sample(logits, states).token_ids


def repeated(row: Tensor, num: int, **params: Any) -> list[int]:
    """What seeds 0 to num - 1 draw from the same row."""
    return tokens(row.expand(num, -1), [state(seed, **params) for seed in range(num)])


def chi_square(drawn: Sequence[int], probs: Sequence[float]) -> float:
    counts = Counter(drawn)
    assert set(counts) <= {i for i, p in enumerate(probs) if p > 0}
    return sum((counts[i] - len(drawn) * p) ** 2 / (len(drawn) * p) for i, p in enumerate(probs) if p > 0)


# The reference


def reference(row: Tensor, params: SamplingParams) -> tuple[list[int], list[float]]:
    """All tokens that the filters leave, likeliest first (in the order of ids without filters); their running sum."""
    if params.is_greedy:
        return [int(row.argmax())], [1.0]
    scaled = (row - row.max()) / torch.tensor(params.temperature)
    relative = scaled.exp().double().tolist()
    order = list(range(len(relative)))
    if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        scores = scaled.tolist()
        order.sort(key=lambda i: (-scores[i], i))
        order = [i for i in order if relative[i] >= float(torch.tensor(params.min_p))]
        order = order[: params.top_k] if params.top_k > 0 else order
        if params.top_p < 1:
            share = float(torch.tensor(params.top_p)) * sum(relative[i] for i in order)
            before, size = 0.0, 0
            while size < len(order) and before < share:
                before += relative[order[size]]
                size += 1
            order = order[: max(size, 1)]
    return order, list(itertools.accumulate(relative[i] for i in order))


def draw(order: list[int], sums: list[float], u: float) -> int:
    """The first token whose running sum is above `u` of the whole."""
    return order[bisect.bisect_right(sums, u * sums[-1])]


def random_row(rng: random.Random, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    row = torch.randn(vocab_size, generator=generator)
    kind = rng.choice(["normal", "flat", "nearly flat", "peaked", "ties", "two values", "masked", "one left", "wide"])
    if kind == "flat":
        row[:] = 3.0
    elif kind == "nearly flat":
        row *= 0.01
    elif kind == "peaked":
        row[rng.randrange(vocab_size)] = 30.0
    elif kind == "ties":
        row = (row * 2).round() / 2
    elif kind == "two values":
        row = (row > 0.3).float()
    elif kind == "masked":
        row[torch.rand(vocab_size, generator=generator) < 0.7] = -INF
        row[0] = 1.0
    elif kind == "one left":
        row[:] = -INF
        row[rng.randrange(vocab_size)] = 0.0
    elif kind == "wide":
        row *= 3e4
    return row


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    # No share that ties exactly with a flat row: there the last bit of a sum would decide.
    return SamplingParams(
        temperature=rng.choice([0.0, 0.1, 0.7, 1.0, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 2, 7, 50, 255, 256, 257, 2048, vocab_size - 1, vocab_size, vocab_size + 5]),
        top_p=rng.choice([1.0, 1.0, 0.987654321, 0.9123456789, 0.512345678, 0.1234567, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.001, 0.05, 0.5, 1.0]),
    )


@pytest.mark.parametrize("vocab_size", [5, 17, 255, 256, 257, 600, 2048, 2049, 5000])
def test_any_row_and_filters_give_the_references_token_and_kept_set(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(vocab_size)
    for _ in range(5):
        # In the order of probability, the last number draws the last token that is kept: where every token before it
        # is drawn in its turn, the sets are the same.
        uniforms = [0.0, LAST, *(rng.random() for _ in range(3))]
        batch = []
        for _ in range(10):
            row, params = random_row(rng, vocab_size), random_params(rng, vocab_size)
            order, sums = reference(row, params)
            batch += [(row, params, u, draw(order, sums, u)) for u in uniforms]
        rng.shuffle(batch)
        draw_with(monkeypatch, [u for _, _, u, _ in batch])
        states = [SamplingState(params, i, [], [], {}) for i, (_, params, _, _) in enumerate(batch)]
        found = tokens(torch.stack([row for row, _, _, _ in batch]), states)
        assert [(p, u, token) for (_, p, u, right), token in zip(batch, found, strict=True) if token != right] == []


@pytest.mark.parametrize("vocab_size", [6, 40, 300])
def test_a_sweep_over_all_numbers_draws_exactly_the_references_kept_set(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(vocab_size)
    draw_with(monkeypatch, [*(i / 1200 for i in range(1200)), LAST])
    for top_k, top_p, min_p in [(0, 0.9, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.2), (4, 0.8, 0.1), (0, 0.5, 0.05)]:
        row = torch.tensor([rng.choice([0.0, 0.5, 1.0, 1.5, -INF]) for _ in range(vocab_size)])
        params = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        kept, _ = reference(row, SamplingParams(**params))
        assert list(dict.fromkeys(repeated(row, 1201, **params))) == kept  # and in this order


@pytest.mark.parametrize(
    ("make_row", "params", "rounds"),
    [
        (lambda: torch.linspace(0, 50, 5000), {"top_p": 0.9}, [256]),
        (lambda: torch.linspace(0, 50, 5000), {"top_k": 255}, [256]),
        (lambda: torch.linspace(0, 50, 5000), {"top_k": 256}, [256, 2048]),
        (lambda: torch.linspace(0, 1, 5000), {"top_p": 0.3}, [256, 2048]),
        (lambda: torch.linspace(0, 1, 5000), {"top_p": 0.9}, [256, 2048, 5000]),
        (lambda: torch.zeros(5000), {"top_p": 0.0001}, [256, 2048, 5000]),  # ties: which 256 topk gives is open
        (lambda: torch.linspace(0, 1, 200), {"top_p": 0.9}, [200]),
    ],
)
def test_candidates_grow_only_where_they_are_too_few(
    make_row: Any, params: dict[str, Any], rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    most_likely = sampling._most_likely

    def watched(scaled: Tensor, num: int) -> tuple[Tensor, Tensor]:
        seen.append(num)
        return most_likely(scaled, num)

    monkeypatch.setattr(sampling, "_most_likely", watched)
    draw_with(monkeypatch, [LAST])
    row = make_row()
    assert tokens(row[None], [state(**params)]) == [reference(row, SamplingParams(**params))[0][-1]]
    assert seen == rounds


@pytest.mark.parametrize("vocab_size", [5, 61, 300, 49153])
def test_a_row_gives_the_same_token_alone_in_a_batch_and_in_any_order(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    logits = torch.stack([random_row(rng, vocab_size) for _ in range(20 if vocab_size < 1000 else 8)])
    states = []
    for seed in range(len(logits)):
        params = random_params(rng, vocab_size)
        extra = rng.choice([{}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"logit_bias": {3: 4.0}}])
        fields = ("temperature", "top_k", "top_p", "min_p")
        changed = {name: getattr(params, name) for name in fields} | extra
        states.append(state(seed, prompt=[0, 1], output=[2] * (seed % 3), **changed, logprobs=seed % 4))
    alone = [sample(logits[i : i + 1].clone(), [states[i]]) for i in range(len(states))]
    whole = SamplerOutput([a.token_ids[0] for a in alone], [a.logprobs[0] for a in alone])
    assert sample(logits, states) == whole
    order = rng.sample(range(len(states)), len(states))
    shuffled = sample(logits[order], [states[i] for i in order])
    assert shuffled.token_ids == [whole.token_ids[i] for i in order]
    assert shuffled.logprobs == [whole.logprobs[i] for i in order]


# The number of an output position


def test_uniform_is_philox_as_its_authors_publish_it() -> None:
    # Random123's known answer for Philox4x64-10, counter 0 and key 0. NumPy counts before it generates.
    assert uniform(0, 2**256 - 1) == (0x16554D9ECA36314C >> 11) * 2.0**-53


def test_uniform_never_changes() -> None:
    assert [uniform(0, 0), uniform(42, 7), uniform(-1, 3)] == [
        0.011546754286331562,
        0.4074136540795371,
        0.10224385374061784,
    ]


def test_uniform_is_a_pure_function_of_seed_and_index() -> None:
    pairs = [(seed, index) for seed in (0, 1, 42, -1, 2**63, 2**64 - 2, -(2**70) - 5, 10**40) for index in range(40)]
    first = {pair: uniform(*pair) for pair in pairs}
    random.Random(0).shuffle(pairs)
    assert {pair: uniform(*pair) for pair in pairs} == first
    assert all(0.0 <= u < 1.0 for u in first.values())
    assert len(set(first.values())) == len(pairs)  # 320 numbers of 53 bits: none twice


@pytest.mark.parametrize("pairs", [[(7, i) for i in range(6400)], [(s, 7) for s in range(6400)]])
def test_uniform_is_uniform_along_indices_and_along_seeds(pairs: list[tuple[int, int]]) -> None:
    values = [uniform(*pair) for pair in pairs]
    assert chi_square([int(u * 32) for u in values], [1 / 32] * 32) < CRITICAL[31]
    # One and the next: no pattern between neighbours either.
    joint = [int(a * 2) * 4 + int(b * 4) for a, b in zip(values[::2], values[1::2], strict=True)]
    assert chi_square(joint, [1 / 8] * 8) < CRITICAL[7]


def test_each_output_position_draws_its_own_number() -> None:
    row = torch.zeros(1, 1000)
    drawn = [tokens(row, [state(5, output=[0] * index)])[0] for index in range(50)]
    assert drawn == [int(uniform(5, index) * 1000) for index in range(50)]
    assert len(set(drawn)) > 40


# The distribution


@pytest.mark.parametrize("along", ["seeds", "indices"])
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_k": 3}, [40 / 85, 30 / 85, 15 / 85, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"min_p": 0.3}, [40 / 85, 30 / 85, 15 / 85, 0, 0]),
        # Squares of the probabilities, in hundredths of a hundredth: 1600, 900, 225, 100, 25.
        ({"temperature": 0.5}, [1600 / 2850, 900 / 2850, 225 / 2850, 100 / 2850, 25 / 2850]),
        # top_p is a share of what top_k leaves: 40 of 85 are below 0.6, 70 of 85 above.
        ({"top_k": 3, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0, 0]),
        # min_p looks at the probabilities after temperature: 225 / 1600 = 0.14.
        ({"temperature": 0.5, "min_p": 0.2}, [16 / 25, 9 / 25, 0, 0, 0]),
    ],
)
def test_frequencies_follow_the_filtered_probabilities(
    along: str, params: dict[str, Any], expected: list[float]
) -> None:
    order = [3, 0, 4, 1, 2]  # ids are not in the order of probability
    row = torch.zeros(8)
    row[5:] = -INF
    row[torch.tensor(order)] = log_rows([0.4, 0.3, 0.15, 0.1, 0.05])[0]
    probs = [0.0] * 8
    for token_id, p in zip(order, expected, strict=True):
        probs[token_id] = p
    states = [
        state(seed=i, **params) if along == "seeds" else state(seed=9, output=[0] * i, **params) for i in range(1500)
    ]
    drawn = tokens(row.expand(1500, -1), states)
    assert chi_square(drawn, probs) < CRITICAL[7]


def test_temperature_two_takes_square_roots() -> None:
    drawn = repeated(log_rows([0.64, 0.36])[0], 2000, temperature=2.0)
    assert chi_square(drawn, [0.8 / 1.4, 0.6 / 1.4]) < CRITICAL[1]


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows([-INF, 1.0, -INF, -200.0, 1.0, -INF])[0]  # exp(-201) is 0 in float32
    draw_with(monkeypatch, [0.0, 0.25, 0.5 - 2**-53, 0.5, 0.75, LAST])
    assert repeated(row, 6) == [1, 1, 1, 4, 4, 4]
    assert repeated(row, 6, top_p=0.99) == [1, 1, 1, 4, 4, 4]


# The public cases


def test_smp_1_a_greedy_row_is_argmax_beside_sampled_ones() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    seen = set()
    for run in range(50):
        states = [
            state(run, temperature=0.0, top_p=0.1, top_k=3),
            state(run, temperature=1.0),
            state(run, temperature=0, top_p=0.9, min_p=0.9),
        ]
        drawn = tokens(logits, states)
        assert [drawn[0], drawn[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]
        seen.add(drawn[1])
    assert len(seen) > 10


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-12])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 4, "min_p": 0.1}])
def test_smp_2_a_tiny_temperature_is_finite_and_near_greedy(temperature: float, filters: dict[str, Any]) -> None:
    logits = rows([-65504.0, 65504.0, 65503.0, 0.0], [3.0, 1.0, 2.0, 0.0], [-65504.0, -65503.0, -65504.0, -INF])
    for seed in range(20):
        states = [state(seed, temperature=temperature, logprobs=1, **filters) for _ in range(3)]
        output = sample(logits, states)
        assert output.token_ids == [1, 0, 1]
        assert all(math.isfinite(entry.logprobs[0]) for entry in output.logprobs if entry)


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
        ([0.5, 0.3, 0.15, 0.05], 0.85, 3),
        ([0.5, 0.3, 0.15, 0.05], 1.0, 4),
        ([0.5, 0.25, 0.125, 0.125], 0.75, 2),
        ([0.5, 0.3, 0.15, 0.05], 0.45, 1),
        ([0.5, 0.3, 0.15, 0.05], 1e-30, 1),
        ([0.25, 0.25, 0.25, 0.25], 0.5, 2),
        ([0.25, 0.25, 0.25, 0.25], 0.51, 3),
    ],
)
def test_smp_3_top_p_keeps_the_smallest_set_that_reaches_it(
    probs: list[float], top_p: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_with(monkeypatch, [*(i / 200 for i in range(200)), LAST])
    assert set(repeated(log_rows(probs)[0], 201, top_p=top_p)) == set(range(kept))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"min_p": 0.5}, {0, 1}),  # 0.25 is half of 0.5, so it stays
        ({"min_p": 0.51}, {0}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.25}, {0, 1, 2, 3}),
        ({"top_k": 3}, {0, 1, 2}),  # of two equal ones, the lower id
        ({"top_k": 2, "top_p": 0.5}, {0}),  # 0.5 of 0.75 reaches half
        ({"top_k": 2, "top_p": 0.7}, {0, 1}),
        ({"min_p": 0.5, "top_p": 0.6}, {0}),  # 0.5 of 0.75 is two thirds
        ({"min_p": 0.5, "top_k": 3}, {0, 1}),
    ],
)
def test_min_p_and_top_k_keep_what_they_should(
    params: dict[str, Any], kept: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_with(monkeypatch, [*(i / 200 for i in range(200)), LAST])
    assert set(repeated(log_rows([0.5, 0.25, 0.125, 0.125])[0], 201, **params)) == kept


def test_smp_5_a_seeded_request_does_not_change_with_its_neighbours() -> None:
    steps = torch.randn(20, 400, generator=torch.Generator().manual_seed(3))
    others = torch.randn(20, 7, 400, generator=torch.Generator().manual_seed(4))

    def run(place: int, num_others: int, twice: bool = False) -> list[list[int]]:
        """The tokens of seed 42 at that row among others, and of its twin, where there is one."""
        outputs: list[list[int]] = [[], []]
        for step in range(len(steps)):
            batch = [(others[step, i], state(1000 + i, top_p=0.9 if i % 2 else 1.0)) for i in range(num_others)]
            mine = (steps[step], state(42, output=outputs[0], temperature=0.8))
            batch.insert(place, mine)
            if twice:
                batch.append(mine)
            drawn = tokens(torch.stack([row for row, _ in batch]), [request for _, request in batch])
            outputs[0].append(drawn[place])
            outputs[1].append(drawn[-1])
        return outputs

    alone = run(0, 0)[0]
    assert len(set(alone)) > 10
    assert run(0, 7)[0] == alone
    assert run(5, 7)[0] == alone
    assert run(3, 7, twice=True) == [alone, alone]


@pytest.mark.parametrize("top_k", [0, -1, 50, 55])
def test_smp_9_top_k_off_or_beyond_the_vocabulary_keeps_every_token(
    top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_with(monkeypatch, [i / 1000 for i in range(1000)])
    assert set(repeated(torch.linspace(0, 2, 50), 1000, top_k=top_k)) == set(range(50))


def test_smp_9_top_k_of_any_size_is_taken() -> None:
    row = torch.linspace(0, 2, 50)
    assert repeated(row, 40, top_k=10**60) == repeated(row, 40, top_k=50)


def test_smp_9_top_k_one_is_greedy() -> None:
    assert repeated(torch.linspace(0, 0.1, 50), 100, top_k=1, temperature=2.0) == [49] * 100


def test_smp_9_ids_beyond_a_head_that_was_cut_are_passed_over() -> None:
    # The model knows 8 ids, its tokenizer 6: the sampler sees 6 scores, a prompt may hold any of the 8.
    logits = rows([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert tokens(logits, [state(prompt=[7, 5], temperature=0, repetition_penalty=2.0)]) == [4]
    assert tokens(logits, [state(eos=[6, 5], temperature=0, min_tokens=1)]) == [4]


# Penalties, biases, masks: what a greedy request then takes, and the adjusted scores themselves


def adjusted(row: Sequence[float], request: SamplingState) -> list[float]:
    changed = rows(row)
    sampling._add_biases(changed, [request])
    sampling._adjust(changed[0], request)
    return [round(value, 5) for value in changed[0].tolist()]


def test_repetition_penalty_moves_tokens_of_prompt_and_output_down_once_each() -> None:
    request = state(prompt=[0, 1, 1], output=[2, 2, 2], repetition_penalty=1.25)
    assert adjusted([2.0, -2.0, 5.0, 1.0, 0.0], request) == [1.6, -2.5, 4.0, 1.0, 0.0]


def test_repetition_penalty_below_one_moves_them_up() -> None:
    request = state(prompt=[0], output=[1], repetition_penalty=0.5)
    assert adjusted([2.0, -2.0, 5.0], request) == [4.0, -1.0, 5.0]


def test_presence_and_frequency_penalties_look_at_the_output_only() -> None:
    both = state(prompt=[3, 3], output=[0, 1, 1, 1], presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted([2.0, 2.0, 2.0, 2.0], both) == [1.25, 0.75, 2.0, 2.0]
    presence = state(prompt=[3], output=[0, 1, 1], presence_penalty=1.5)
    assert adjusted([2.0, 2.0, 2.0, 2.0], presence) == [0.5, 0.5, 2.0, 2.0]
    frequency = state(prompt=[3], output=[0, 1, 1], frequency_penalty=-1.0)
    assert adjusted([2.0, 2.0, 2.0, 2.0], frequency) == [3.0, 4.0, 2.0, 2.0]


def test_presence_penalty_without_output_changes_nothing() -> None:
    request = state(prompt=[0, 1], presence_penalty=2.0, frequency_penalty=2.0)
    assert adjusted([2.0, 2.5], request) == [2.0, 2.5]


def test_logit_bias_is_added_before_the_penalties() -> None:
    request = state(prompt=[1], logit_bias={0: -3.0, 1: 4.0}, repetition_penalty=2.0)
    assert adjusted([2.0, 2.0, 2.0], request) == [-1.0, 3.0, 2.0]


def test_penalties_come_before_temperature() -> None:
    # 4 - 2 = 2 against 3, at temperature 0.5: e^-2 to 1 (after temperature, the penalty would only make it even).
    drawn = tokens(
        rows([4.0, 3.0]).expand(2000, -1),
        [state(i, output=[0], presence_penalty=2.0, temperature=0.5) for i in range(2000)],
    )
    odds = math.exp(-2)
    assert chi_square(drawn, [odds / (1 + odds), 1 / (1 + odds)]) < CRITICAL[1]


def test_greedy_rows_are_adjusted_too() -> None:
    logits = rows([5.0, 4.0, 3.0])
    assert tokens(logits, [state(temperature=0, logit_bias={2: 10.0})]) == [2]
    assert tokens(logits, [state(temperature=0, logit_bias={0: -100.0})]) == [1]
    assert tokens(logits, [state(temperature=0, prompt=[0], repetition_penalty=1.5)]) == [1]
    assert tokens(logits, [state(temperature=0, output=[0, 1], presence_penalty=2.0)]) == [0]  # 3, 2, 3: the first
    assert tokens(logits, [state(temperature=0, output=[0, 0, 1], frequency_penalty=2.0)]) == [2]


def test_len_8_min_tokens_masks_every_end_token_until_then() -> None:
    logits = rows([1.0, 2.0, 9.0, 8.0, 7.0])
    found = [
        tokens(logits, [state(temperature=0, eos=[2, 3], stop_token_ids=[4], min_tokens=4, output=[0] * k)])[0]
        for k in range(6)
    ]
    assert found == [1, 1, 1, 1, 2, 2]


def test_len_8_a_masked_end_token_stays_so_whatever_its_bias() -> None:
    request = state(temperature=0, eos=[2], min_tokens=1, logit_bias={2: 100.0})
    assert tokens(rows([1.0, 2.0, 3.0]), [request]) == [1]


def test_len_8_ignore_eos_masks_only_the_callers_stop_tokens() -> None:
    request = state(temperature=0, eos=[2], stop_token_ids=[1], min_tokens=2, ignore_eos=True)
    assert tokens(rows([1.0, 4.0, 3.0]), [request]) == [2]


def test_adjustments_do_not_reach_other_rows_or_the_models_logits() -> None:
    logits = rows([5.0, 4.0, 3.0], [5.0, 4.0, 3.0])
    before = logits.clone()
    states = [state(temperature=0, logit_bias={0: -50.0}, eos=[1], min_tokens=3, logprobs=2), state(temperature=0)]
    assert tokens(logits, states) == [2, 0]
    assert tokens(logits, [state(i, top_p=0.5, repetition_penalty=1.2, prompt=[0]) for i in range(2)]) is not None
    assert torch.equal(logits, before)


# Log-probabilities

RAW = [0.1, 0.2, 0.4, 0.25, 0.05]


def test_lgp_4_values_are_those_of_the_raw_logits_whatever_the_sampling() -> None:
    logits = log_rows(RAW) + 3.0
    expected = {i: math.log(p) for i, p in enumerate(RAW)}
    for params in (
        {"temperature": 0},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 2},
        {"top_p": 0.5, "min_p": 0.3},
        {"logit_bias": {0: 50.0}},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"min_tokens": 3},
    ):
        request = state(7, prompt=[2], output=[3, 3], eos=[2], logprobs=5, **params)
        (entry,) = sample(logits, [request]).logprobs
        assert entry is not None
        assert entry.token_ids[1:] == [2, 3, 1, 0, 4]
        assert entry.ranks[1:] == [1, 2, 3, 4, 5]
        assert entry.logprobs == pytest.approx([expected[i] for i in entry.token_ids], abs=1e-5)


def test_lgp_4_zero_alternatives_report_the_sampled_token_alone() -> None:
    output = sample(log_rows(RAW), [state(temperature=0, logprobs=0)])
    (entry,) = output.logprobs
    assert entry is not None
    assert (entry.token_ids, entry.ranks) == ([2], [1])
    assert entry.logprobs == pytest.approx([math.log(0.4)], abs=1e-6)


def test_lgp_4_a_sampled_token_outside_the_likeliest_comes_first_with_its_rank() -> None:
    output = sample(log_rows(RAW), [state(temperature=0, logit_bias={0: 50.0}, logprobs=2)])
    (entry,) = output.logprobs
    assert entry is not None
    assert output.token_ids == [0]
    assert (entry.token_ids, entry.ranks) == ([0, 2, 3], [4, 1, 2])
    assert entry.logprobs == pytest.approx([math.log(0.1), math.log(0.4), math.log(0.25)], abs=1e-6)


def test_lgp_4_only_rows_that_asked_get_any() -> None:
    entries = sample(log_rows(RAW, RAW, RAW), [state(), state(logprobs=1), state()]).logprobs
    assert [entry is None for entry in entries] == [True, False, True]


def test_lgp_4_more_alternatives_than_tokens_give_them_all() -> None:
    (entry,) = sample(log_rows(RAW), [state(temperature=0, logprobs=20)]).logprobs
    assert entry is not None
    assert (entry.token_ids, entry.ranks) == ([2, 2, 3, 1, 0, 4], [1, 1, 2, 3, 4, 5])


def test_lgp_4_equal_tokens_are_ranked_by_id_and_share_the_sampled_ones_rank() -> None:
    (entry,) = sample(rows([0.0, 1.0, 1.0, 1.0]), [state(temperature=0, logit_bias={2: 1.0}, logprobs=3)]).logprobs
    assert entry is not None
    assert (entry.token_ids, entry.ranks) == ([2, 1, 2, 3], [1, 1, 2, 3])


def test_lgp_2_logits_of_minus_infinity_are_reported_as_such() -> None:
    logits = rows([-INF, 0.0, -INF, 0.0, -INF, -INF])
    output = sample(logits, [state(temperature=0, logprobs=5)])
    (entry,) = output.logprobs
    assert entry is not None
    assert output.token_ids == [1]
    assert entry.token_ids[:3] == [1, 1, 3]
    assert len(set(entry.token_ids[3:]) & {0, 2, 4, 5}) == 3  # which of equals come last is open
    assert entry.logprobs == pytest.approx([-math.log(2), -math.log(2), -math.log(2), -INF, -INF, -INF])
    assert entry.ranks == [1, 1, 2, 3, 4, 5]


def test_lgp_2_a_row_of_nan_neither_crashes_nor_disturbs_its_neighbours(caplog: pytest.LogCaptureFixture) -> None:
    good = torch.randn(3, 600, generator=torch.Generator().manual_seed(5))
    params: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_p": 0.9, "top_k": 300}]
    states = [state(i, logprobs=2, **p) for i, p in enumerate(params)]
    alone = sample(good, states)
    for bad_row in (torch.full((600,), math.nan), good[0].where(torch.arange(600) != 7, math.nan)):
        for bad_params in params:
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                output = sample(torch.cat([good, bad_row[None]]), [*states, state(9, logprobs=3, **bad_params)])
            assert output.token_ids[:3] == alone.token_ids
            assert output.logprobs[:3] == alone.logprobs
            assert 0 <= output.token_ids[3] < 600
            entry = output.logprobs[3]
            assert entry is not None
            assert math.isnan(entry.logprobs[0])
            assert "not finite" in caplog.text


def test_a_row_with_an_infinite_logit_takes_it_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    for params in ({"temperature": 0}, {}, {"top_p": 0.9}):
        assert tokens(rows([0.0, INF, 1.0]), [state(**params)]) == [1]
    assert "not finite" in caplog.text


def test_healthy_logits_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sample(rows([0.0, -INF, 1.0]), [state()])
    assert caplog.text == ""


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}])
def test_a_row_with_every_token_masked_gives_some_token(params: dict[str, Any]) -> None:
    assert tokens(torch.full((1, 300), -INF), [state(**params)])[0] in range(300)


def test_one_state_for_each_row_is_wanted() -> None:
    with pytest.raises(ValueError, match="zip"):
        sample(torch.zeros(2, 5), [state(logit_bias={1: 1.0})])


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 5), []) == SamplerOutput([], [])


# --- what holds for a request is done once for it


def biased_one_by_one(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    biased = logits.clone()
    for row, one in zip(biased, states, strict=True):
        for token_id, bias in (one.params.logit_bias or {}).items():
            if token_id < len(row):
                row[token_id] += bias
    return biased


def test_unt_2_biases_are_added_for_all_rows_at_once_as_they_are_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(1))
    random_bias = random.Random(0)
    many = SamplingParams(logit_bias={i: random_bias.uniform(-9, 9) for i in range(700)}, temperature=0)
    few = SamplingParams(logit_bias={5: 4.5, 599: -3.0, 600: 1.0}, temperature=0)
    plain = SamplingParams(temperature=0)
    states = [SamplingState.create(params, [], [], i) for i, params in enumerate([many, few, plain, many, few, few])]
    chosen: list[Tensor] = []
    monkeypatch.setattr(sampling, "_adjust", lambda row, _: chosen.append(row.clone()))
    sample(logits, states)
    assert torch.equal(torch.stack(chosen), biased_one_by_one(logits, states))


def test_unt_2_a_bias_is_made_once_for_a_request_and_not_for_each_choice_and_token() -> None:
    class Counted(LogitBias):
        num_reads = 0

        def items(self) -> Any:
            Counted.num_reads += 1
            return super().items()

    params = SamplingParams(n=32, logit_bias=dict.fromkeys(range(600), 0.5))
    object.__setattr__(params, "logit_bias", Counted(params.logit_bias or {}))
    states = [SamplingState.create(params, [], [], i) for i in range(32)]
    for _ in range(5):
        sample(torch.zeros(32, 600), states)
    assert Counted.num_reads == 1


def test_unt_60_logits_that_are_not_finite_are_told_once_for_a_request(caplog: pytest.LogCaptureFixture) -> None:
    nan = torch.full((2, 50), math.nan)
    states = [state(0), state(1)]
    for _ in range(4):
        sample(nan, states)
    assert [record.message[:39] for record in caplog.records] == ["The model's logits are not finite, the "]
    sample(nan[:1], [state(2)])  # another request
    assert len(caplog.records) == 2


def test_unt_60_a_penalty_beyond_float32_is_told_once_and_not_as_the_models_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    penalised = state(0, output=[3], repetition_penalty=1e-300)
    for _ in range(4):
        sample(torch.ones(1, 50), [penalised])
    [record] = caplog.records
    assert "repetition_penalty" in record.message
    assert "model's logits" not in record.message
