"""What each step of speculative decoding takes and keeps: its rows, its blocks, its KV, and where an answer ends."""

import random

import pytest
import torch

from common.sampling_params import SamplingParams
from tests.kit.drafters import SPECULATION, Counts, options, right, speculate, wrong
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import EOS, EOT, byte_tokenizer

SINCE = "v0_7"

PROMPT = [(7 * i + i * i) % 256 for i in range(11)]


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True} | params)


def engine_of(milestone, tiny, **flags):
    return milestone.LLMEngine(**tiny.ready, **{"num_blocks": 100, "block_size": 4} | flags)


def answers_of(tiny, *prompts, num_tokens=64):
    return {tuple(prompt): tiny.tokens(prompt, num_tokens) for prompt in prompts}


def run(engine, each_step=lambda: None):
    """Step until all is done; each request's tokens, by its id and its choice, as they came: a list of each step's."""
    came = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for choice in output.outputs:
                came.setdefault((output.request_id, choice.index), []).append(choice.token_ids)
        assert_exact(engine.scheduler)
        each_step()
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    return {key[0] if key[1] == 0 else key: steps for key, steps in came.items()}


def assert_exact(scheduler):
    """A request that decodes has KV, and room, for all its tokens but the last one; nobody else has a block."""
    scheduler.check_integrity()
    manager = scheduler.block_manager
    for request in scheduler.running:
        num_kv = manager.num_tokens(request.request_id)
        assert num_kv == request.num_computed_tokens
        assert len(manager.block_table(request.request_id)) == -(-num_kv // manager.block_size)
        if request.sampling.output_token_ids and not request.num_preemptions:
            assert num_kv == request.num_tokens - 1


def flat(steps):
    return [token_id for step in steps for token_id in step]


# How many steps it takes.


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_always_right_drafts_give_one_token_more_than_their_number_in_each_step(milestone, tiny, num_drafts):
    engine = engine_of(milestone, tiny)
    speculate(engine, right(answers_of(tiny, PROMPT)), num_drafts)
    engine.add_request("A", PROMPT, greedy(30))
    steps = run(engine)["A"]
    assert flat(steps) == tiny.tokens(PROMPT, 30)
    whole, rest = divmod(29, num_drafts + 1)  # the first token comes from the prompt
    assert [len(step) for step in steps] == [1, *[num_drafts + 1] * whole, *([rest] if rest else [])]


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_always_wrong_drafts_cost_rows_but_give_the_token_of_plain_decoding_in_each_step(milestone, tiny, num_drafts):
    engine = engine_of(milestone, tiny)
    drafter = speculate(engine, wrong(answers_of(tiny, PROMPT)), num_drafts)
    counts = Counts(engine)
    engine.add_request("A", PROMPT, greedy(20))
    steps = run(engine)["A"]
    assert steps == [[token_id] for token_id in tiny.tokens(PROMPT, 20)]
    # In the last steps less may be written: with `left` tokens to come, no more than `left - 1` are drafted.
    expected = [0, *(min(num_drafts, left - 1) for left in range(19, 0, -1))]
    assert [step["A/0"] for step in drafter.log] == expected
    assert (counts.num_drafts, counts.num_right) == (sum(expected), 0)


@pytest.mark.parametrize("num_right", range(6))
def test_drafts_count_up_to_the_first_wrong_one_whatever_comes_behind(milestone, tiny, num_right):
    """Of five drafts, the one behind `num_right` right ones is wrong; those after it are right again."""
    engine = engine_of(milestone, tiny)
    answers = answers_of(tiny, PROMPT)
    good, bad = right(answers), wrong(answers)

    def guess(request, index):
        place = index - len(request.sampling.output_token_ids)
        return (bad if place == num_right else good)(request, index)

    speculate(engine, guess, 5)
    engine.add_request("A", PROMPT, greedy(40))
    steps = run(engine)["A"]
    assert flat(steps) == tiny.tokens(PROMPT, 40)
    assert [len(step) for step in steps[1:-5]] == [num_right + 1] * len(steps[1:-5])
    assert len(steps) == 1 + -(-39 // (num_right + 1))


def test_each_request_of_a_step_has_its_own_accepted_length(milestone, tiny):
    prompts = {"right": PROMPT, "wrong": PROMPT[:5], "half": PROMPT[3:9]}
    answers = answers_of(tiny, *prompts.values())
    good, bad = right(answers), wrong(answers)

    def guess(request, index):
        name = request.request_id.split("/")[0]
        place = index - len(request.sampling.output_token_ids)
        return (good if name == "right" or (name == "half" and place < 2) else bad)(request, index)

    engine = engine_of(milestone, tiny)
    speculate(engine, guess, 4)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(16))
    came = run(engine)
    assert {name: flat(steps) for name, steps in came.items()} == {
        name: tiny.tokens(prompt, 16) for name, prompt in prompts.items()
    }
    assert [len(step) for step in came["right"]] == [1, 5, 5, 5]
    assert [len(step) for step in came["half"]] == [1, 3, 3, 3, 3, 3]
    assert [len(step) for step in came["wrong"]] == [1] * 16


# Where an answer ends.


@pytest.mark.parametrize("place", range(1, 9))
def test_spd_1_an_end_token_among_accepted_drafts_is_the_last(milestone, tiny, place):
    """The answer's third token is an end token, and so on: whichever it is, nothing comes behind it."""
    answer = tiny.tokens(PROMPT, 20)
    end = answer[place]
    assert end not in answer[:place]
    engine = engine_of(milestone, tiny)
    speculate(engine, right(answers_of(tiny, PROMPT)), 4)
    engine.add_request("A", PROMPT, greedy(20, stop_token_ids=[end]))
    outputs, counts = [], Counts(engine)
    while engine.has_unfinished_requests():
        outputs += engine.step()
        assert_exact(engine.scheduler)
    assert [t for output in outputs for t in output.outputs[0].token_ids] == answer[: place + 1]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", end)
    assert outputs[-1].finished
    assert len(outputs) == 1 + -(-place // 5)
    assert counts.num_right == place - place // 5  # the end token is one of them, unless it came without being guessed


@pytest.mark.parametrize("end", [EOS, EOT])
def test_spd_1_the_models_end_token_among_accepted_drafts_ends_the_answer_without_its_text(milestone, end):
    script = [*b"abc", end, *b"defgh"]
    engine = milestone.LLMEngine(ScriptModel(script, 2), tokenizer=byte_tokenizer(), num_blocks=20, block_size=4)
    speculate(engine, lambda request, index: script[index], 4)
    engine.add_request("A", "Hi", greedy(9, ignore_eos=False))
    first, last = engine.step(), engine.step()
    assert not engine.has_unfinished_requests()
    [choice] = last[0].outputs
    assert (first[0].outputs[0].text, choice.text, choice.token_ids) == ("a", "bc", [*b"bc", end])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None if end == EOS else end)


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_spd_2_max_tokens_is_exact_though_more_drafts_are_right(milestone, tiny, max_tokens):
    engine = engine_of(milestone, tiny)
    drafter = speculate(engine, right(answers_of(tiny, PROMPT)), 4)
    engine.add_request("A", PROMPT, greedy(max_tokens))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [t for output in outputs for t in output.outputs[0].token_ids] == tiny.tokens(PROMPT, max_tokens)
    assert outputs[-1].outputs[0].finish_reason == "length"
    # A draft is followed by a token, so that no draft is computed which could not be kept.
    assert [step["A/0"] for step in drafter.log] == {
        1: [0], 2: [0, 0], 3: [0, 1], 4: [0, 2], 5: [0, 3], 6: [0, 4], 7: [0, 4, 0], 8: [0, 4, 1], 9: [0, 4, 2]
    }[max_tokens]  # fmt: skip


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_spd_2_an_end_token_inside_the_cap_beats_it_and_one_behind_it_does_not(milestone, max_tokens):
    script = [*b"abcd", EOS, *b"fghijk"]
    llm = milestone.LLM(ScriptModel(script, 2), tokenizer=byte_tokenizer(), num_blocks=20, block_size=4)
    speculate(llm.engine, lambda request, index: script[index], 4)
    [output] = llm.generate(["Hi"], greedy(max_tokens, ignore_eos=False), use_tqdm=False)
    [choice] = output.outputs
    assert choice.token_ids == script[: min(max_tokens, 5)]
    assert choice.text == "abcd"[:max_tokens]
    assert choice.finish_reason == ("stop" if max_tokens >= 5 else "length")


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_a_stop_string_inside_accepted_tokens_ends_the_answer_there(milestone, num_drafts, shown):
    script = list(b"abcdefghijklmnop")

    def answer(num_drafts):
        llm = milestone.LLM(ScriptModel(script, 2), tokenizer=byte_tokenizer(), num_blocks=20, block_size=4)
        speculate(llm.engine, lambda request, index: script[index], num_drafts)
        params = greedy(16, stop=["hij", "efg"], include_stop_str_in_output=shown, logprobs=0)
        [output] = llm.generate(["Hi"], params, use_tqdm=False)
        assert llm.engine.scheduler.block_manager.num_free_blocks == 20
        assert not llm.engine.has_unfinished_requests()
        [choice] = output.outputs
        return choice.text, choice.token_ids, len(choice.logprobs), choice.finish_reason, choice.stop_reason

    assert answer(num_drafts) == answer(0) == ("abcdefg" if shown else "abcd", script[:7], 7, "stop", "efg")


def test_characters_over_several_accepted_tokens_are_shown_whole(milestone):
    text = "🙂中é ok"
    script = [*text.encode(), EOS]
    llm = milestone.LLM(ScriptModel(script, 2), tokenizer=byte_tokenizer(), num_blocks=20, block_size=4)
    speculate(llm.engine, lambda request, index: script[index] if index < len(script) else 0, 2)
    deltas = [output.outputs[0].text for output in llm.stream("Hi", greedy(20, ignore_eos=False))]
    assert deltas == ["", "🙂", "中", "é ", "ok"]


@pytest.mark.parametrize("method", SPECULATION)
def test_an_answer_fills_the_context_and_the_pool_to_their_last_token(milestone, tiny, method):
    params = greedy(None)
    llm = milestone.LLM(**tiny.ready, max_model_len=48, num_blocks=50, block_size=4, **options(method, tiny, 8))
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].token_ids == tiny.tokens(PROMPT, 48 - 11)
    assert output.outputs[0].finish_reason == "length"
    llm = milestone.LLM(**tiny.ready, max_model_len=64, num_blocks=5, block_size=4, **options(method, tiny, 8))
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].token_ids == tiny.tokens(PROMPT, 20 + 1 - 11)  # the last token needs no KV
    assert output.metrics.num_preemptions == 0


# What a step may take.


@pytest.mark.parametrize(
    ("limit", "flags", "expected"),
    [
        ("max_model_len", {"max_model_len": 20}, [0, 4, 2]),
        ("the pool", {"num_blocks": 5, "max_model_len": 64}, [0, 4, 3]),
        ("the budget", {"max_num_batched_tokens": 3, "max_model_len": 20}, [0, 0, 0, 0, 2, 2, 1]),
    ],
)
def test_drafts_become_fewer_where_less_has_room(milestone, tiny, limit, flags, expected):
    """`PROMPT` has 11 tokens, so that 9 fit behind it into a context of 20, and 10 into a pool of 20."""
    engine = engine_of(milestone, tiny, **flags)
    drafter = speculate(engine, right(answers_of(tiny, PROMPT)), 4)
    engine.add_request("A", PROMPT, greedy(None))
    steps = run(engine)["A"]
    assert flat(steps) == tiny.tokens(PROMPT, 10 if limit == "the pool" else 9)
    assert [step["A/0"] for step in drafter.log] == expected


def test_drafts_are_counted_in_the_budget_and_take_only_what_known_tokens_leave(milestone, tiny):
    prompts = [PROMPT[:3], PROMPT[2:4], PROMPT[5:7]]
    engine = engine_of(milestone, tiny, max_num_batched_tokens=8, max_num_seqs=4)
    drafter = speculate(engine, wrong(answers_of(tiny, *prompts, PROMPT)), 4)
    scheduled = []
    engine.on_step = lambda step: scheduled.append(list(step.num_scheduled_tokens))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(20))
    for _ in range(3):
        engine.step()
    assert scheduled == [[3, 2, 2], [5, 2, 1], [5, 2, 1]]
    assert [list(step.values()) for step in drafter.log] == [[0, 0, 0], [4, 1, 0], [4, 1, 0]]
    engine.add_request(
        "long", PROMPT, greedy(3)
    )  # computes its prompt with five tokens a step; nobody drafts meanwhile
    for _ in range(3):
        engine.step()
        assert_exact(engine.scheduler)
    assert scheduled[3:] == [[1, 1, 1, 5], [1, 1, 1, 5], [5, 1, 1, 1]]
    run(engine)


@pytest.mark.parametrize("num_blocks", [9, 12, 16])
@pytest.mark.parametrize("n", [1, 2])
def test_wrong_drafts_change_nothing_of_what_anybody_gets_in_a_tight_pool(milestone, tiny, num_blocks, n):
    """Step for step the same requests compute, are preempted and wait, with as many blocks: drafts took none."""
    prompts = [PROMPT[:length] for length in (3, 9, 1, 7, 11, 4)]
    answers = answers_of(tiny, *prompts)

    def history(num_drafts):
        flags = {"num_blocks": num_blocks, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
        engine = engine_of(milestone, tiny, **flags)
        speculate(engine, wrong(answers), num_drafts)
        counts, steps = Counts(engine), []

        def on_step(scheduled):
            counts(scheduled)
            known = [a - b for a, b in zip(scheduled.num_scheduled_tokens, scheduled.num_draft_tokens, strict=True)]
            names = [[request.request_id for request in group] for group in (scheduled.requests, scheduled.preempted)]
            assert sum(scheduled.num_scheduled_tokens) <= 16
            steps.append((names, known, engine.scheduler.block_manager.num_free_blocks, len(engine.scheduler.waiting)))

        engine.on_step = on_step
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, greedy(12, n=n))
        run(engine)
        return steps, counts.num_drafts

    expected, none = history(0)
    assert none == 0
    assert any(preempted for (_, preempted), *_ in expected)
    steps, num_drafts = history(5)
    assert num_drafts > 20
    assert steps == expected


def test_choices_begin_with_the_kv_of_their_prompt_and_compute_none_of_it_again(milestone, tiny):
    engine = engine_of(milestone, tiny)
    drafter = speculate(engine, right(answers_of(tiny, PROMPT)), 4)
    scheduled = []
    engine.on_step = lambda step: scheduled.append(list(step.num_scheduled_tokens))
    engine.add_request("A", PROMPT, greedy(11, n=3))
    came = run(engine)
    assert [flat(steps) for steps in came.values()] == [tiny.tokens(PROMPT, 11)] * 3
    assert scheduled == [[11], [5, 5, 5], [5, 5, 5]]
    assert [list(step.values()) for step in drafter.log] == [[0], [4, 4, 4], [4, 4, 4]]


def test_a_draft_takes_no_block_that_a_running_request_needs_in_the_same_step(milestone, tiny):
    """A and B have four tokens each, in one block of four; of three blocks one is free, and both want one."""
    prompts = {"A": PROMPT[:4], "B": PROMPT[4:7]}
    engine = engine_of(milestone, tiny, num_blocks=3, max_model_len=12, enable_prefix_caching=False)
    drafter = speculate(engine, right(answers_of(tiny, *prompts.values())), 4)
    engine.add_request("A", prompts["A"], greedy(4))
    engine.add_request("B", prompts["B"], greedy(2))
    preempted = []
    engine.on_step = lambda step: preempted.extend(step.preempted)
    # A's second step takes the free block for its known token, and may guess on in it. B's fourth token fits into its
    # own block, and its last is not drafted.
    came = run(engine)
    assert preempted == []
    assert drafter.log == [{"A/0": 0, "B/0": 0}, {"A/0": 2, "B/0": 0}]
    assert came == {"A": [answers_of(tiny, PROMPT[:4])[tuple(PROMPT[:4])][:1], tiny.tokens(PROMPT[:4], 4)[1:]],
                    "B": [[t] for t in tiny.tokens(PROMPT[4:7], 2)]}  # fmt: skip


# What stays in the cache.


def kv_of(engine, request, kv_cache=None):
    """`[layers, 2, num_computed_tokens, heads, head_dim]`."""
    pool = kv_cache or engine.model_runner.kv_cache
    table = engine.scheduler.block_manager.block_table(request.request_id)
    if hasattr(pool, "read"):  # one with a layout of its own
        kv = torch.stack([torch.stack(pool.read(layer, table)) for layer in range(len(pool.kv))])
    else:
        kv = pool.kv[:, :, table].flatten(2, 3)
    return kv[:, :, : request.num_computed_tokens].clone()


def plain_kv(milestone, tiny, prompt, num_tokens, sampling):
    engine = engine_of(milestone, tiny)
    engine.add_request("A", prompt, sampling(num_tokens + 1))
    for _ in range(num_tokens):
        engine.step()
    [request] = engine.scheduler.running
    return kv_of(engine, request)


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("method", [*SPECULATION, "mixed"])
def test_spd_4_after_each_step_the_kv_is_that_of_plain_decoding_and_no_longer(milestone, tiny, method, num_tokens):
    def sampling(max_tokens):
        return SamplingParams(
            temperature=0.7, seed=4, logit_bias=dict.fromkeys((3, 5, 9), 100.0), max_tokens=max_tokens
        )

    expected = plain_kv(milestone, tiny, PROMPT, 32, sampling)
    answers = {tuple(PROMPT): milestone.LLM(**tiny.ready, num_blocks=50).generate([PROMPT], sampling(32))[0].outputs[0]}
    answers = {prompt: choice.token_ids for prompt, choice in answers.items()}
    if method == "mixed":
        engine = engine_of(milestone, tiny)
        coin, good, bad = random.Random(num_tokens), right(answers), wrong(answers)
        speculate(engine, lambda *args: (good if coin.random() < 0.6 else bad)(*args), num_tokens)
    else:
        engine = engine_of(milestone, tiny, **options(method, tiny, num_tokens))
    engine.add_request("A", PROMPT, sampling(32))
    counts, lengths, tokens = Counts(engine), [], []

    def compare():
        for request in engine.scheduler.running:
            kv = kv_of(engine, request)
            lengths.append(kv.shape[2])
            assert torch.allclose(kv, expected[:, :, : kv.shape[2]], atol=1e-4)
            if method == "itself":  # of what the draft model has written, the same is left
                its_own = kv_of(engine, request, engine.model_runner.drafter.kv_cache)
                assert torch.allclose(its_own, kv, atol=1e-4)
            tokens[:] = request.sampling.output_token_ids
            assert kv.shape[2] == len(PROMPT) + len(tokens) - 1

    run(engine, compare)
    assert counts.num_drafts > counts.num_right
    assert tokens == answers[tuple(PROMPT)][: len(tokens)]
    assert lengths[0] == 11
    assert lengths == sorted(set(lengths))


def test_blocks_are_published_up_to_the_last_verified_token_and_no_further(milestone, tiny):
    engine = engine_of(milestone, tiny)
    answers = answers_of(tiny, PROMPT)
    good, bad = right(answers), wrong(answers)
    # Of eight drafts, five are right: 11 + 1 tokens, then 6 more in each step; two blocks of four are drafted over.
    speculate(engine, lambda r, i: (good if i - len(r.sampling.output_token_ids) < 5 else bad)(r, i), 8)
    engine.add_request("A", PROMPT, greedy(60))
    manager = engine.scheduler.block_manager
    answer = tiny.tokens(PROMPT, 64)
    for num_steps in range(1, 8):
        engine.step()
        [request] = engine.scheduler.running
        num_kv = 11 + 6 * (num_steps - 1)
        assert request.num_computed_tokens == num_kv
        # What was checked last: right ones, and behind them rejected ones, which are no part of the text.
        verified = [*PROMPT, *answer[: num_kv - 11 + 1]]
        for sequence in ([*PROMPT, *answer], [*verified, *request.draft_token_ids[5:], 1, 2, 3, 4]):
            found = manager.find_prefix(lambda start, end: sequence[start:end], len(sequence))  # noqa: B023
            assert len(found) == num_kv // 4
            assert found == manager.block_table("A/0")[: num_kv // 4]


def test_a_request_that_begins_with_rejected_drafts_does_not_find_their_blocks(milestone, tiny):
    answers = answers_of(tiny, PROMPT)
    bad = wrong(answers)
    rejected = [*PROMPT, answers[tuple(PROMPT)][0]]
    rejected += [(token_id + 1) % 256 for token_id in answers[tuple(PROMPT)][1:9]]
    engine = engine_of(milestone, tiny)
    speculate(engine, lambda r, i: bad(r, i) if tuple(r.sampling.prompt_token_ids) == tuple(PROMPT) else 0, 8)
    engine.add_request("A", PROMPT, greedy(30))
    engine.step()
    engine.step()  # the eight drafts behind `PROMPT` and its first token are rejected
    engine.add_request("B", [*rejected, 1], greedy(6))
    came, cached = {"A": [], "B": []}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            came[output.request_id] += output.outputs[0].token_ids
            cached[output.request_id] = output.num_cached_tokens
    assert cached == {"A": 0, "B": 12}  # `PROMPT` and the token that is no draft: three blocks
    assert came["B"] == tiny.tokens([*rejected, 1], 6)


# Whether it is worth it.


def drafts_of(milestone, tiny, below, num_right, num_drafts=4, num_tokens=100):
    """How many drafts each step has, where so many of its drafts are right."""
    answers = answers_of(tiny, PROMPT, num_tokens=num_tokens)
    good, bad = right(answers), wrong(answers)
    engine = engine_of(milestone, tiny, speculative_disable_below=below)
    drafter = speculate(
        engine, lambda r, i: (good if i - len(r.sampling.output_token_ids) < num_right else bad)(r, i), num_drafts
    )
    engine.add_request("A", PROMPT, greedy(num_tokens))
    assert flat(run(engine)["A"]) == answers[tuple(PROMPT)]
    return [step["A/0"] for step in drafter.log]


@pytest.mark.parametrize(
    ("below", "num_right", "stops"),
    [
        (0.5, 0, True),
        (0.5, 1, True),
        (0.5, 2, False),
        (0.5, 4, False),
        (0.51, 2, True),
        (1.0, 3, True),
        (0.0, 0, False),
    ],
)
def test_drafting_stops_for_a_request_whose_drafts_are_too_seldom_right(milestone, tiny, below, num_right, stops):
    drafts = drafts_of(milestone, tiny, below, num_right)
    # It is known after 32 drafts, which are 8 steps of 4: the first step is the prompt's.
    assert drafts[:9] == [0, *[4] * 8]
    assert (sum(drafts[9:]) == 0) == stops


def test_drafting_stops_for_one_request_and_goes_on_for_another(milestone, tiny):
    prompts = {"good": PROMPT, "bad": PROMPT[:6]}
    answers = answers_of(tiny, *prompts.values(), num_tokens=100)
    good, bad = right(answers), wrong(answers)
    engine = engine_of(milestone, tiny, speculative_disable_below=0.3)
    drafter = speculate(engine, lambda r, i: (good if r.request_id == "good/0" else bad)(r, i), 4)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(60))
    came = run(engine)
    assert {name: flat(steps) for name, steps in came.items()} == {
        name: tiny.tokens(prompt, 60) for name, prompt in prompts.items()
    }
    assert [step.get("bad/0") for step in drafter.log] == [0, *[4] * 8, *[0] * 51]
    assert [step["good/0"] for step in drafter.log if "good/0" in step] == [0, *[4] * 11, 3]
