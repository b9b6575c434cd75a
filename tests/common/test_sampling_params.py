"""What a caller may ask for, what is refused and in which words, and what ends a request."""

import math
from typing import Any

import pytest

from common.errors import RequestError
from common.sampling_params import LogitBias, SamplingParams, SamplingState, check_request

EOS, EOT = 257, 258


def refusal(**params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    return caught.value


def check(num_prompt_tokens: int, *, vocab_size: int = 272, max_model_len: int = 64, **params: Any) -> None:
    check_request(num_prompt_tokens, SamplingParams(**params), vocab_size=vocab_size, max_model_len=max_model_len)


def check_refusal(num_prompt_tokens: int, **arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(num_prompt_tokens, **arguments)
    return caught.value


def state(output: list[int], *, prompt: int = 3, eos: tuple[int, ...] = (EOS, EOT), **params: Any) -> SamplingState:
    made = SamplingState.create(SamplingParams(**params), [1] * prompt, eos, seed=0)
    made.output_token_ids += output
    return made


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    found = {name: getattr(params, name) for name in SamplingParams.__slots__}
    assert found == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "seed": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }
    assert not params.is_greedy


def test_params_cannot_be_changed_behind_the_check() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = -1.0  # type: ignore[misc]


# Lengths


@pytest.mark.parametrize("value", [0, -1])
def test_len_2_max_tokens_below_one_is_refused(value: int) -> None:
    error = refusal(max_tokens=value)
    assert str(error) == f"max_tokens must be at least 1, got {value}."
    assert error.param == "max_tokens"


def test_max_tokens_may_be_0_where_the_prompt_is_to_be_scored_and_ends_at_whatever_token_comes() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert str(refusal(max_tokens=-1, prompt_logprobs=0)) == "max_tokens must be at least 0, got -1."
    assert refusal(max_tokens=0, prompt_logprobs=0, min_tokens=1).param == "min_tokens"
    for token_id in (5, EOS):
        assert state([token_id], max_tokens=0, prompt_logprobs=0).finish_reason(64) == ("length", None)


def test_prompt_logprobs_are_refused_by_an_engine_that_does_not_say_that_it_computes_them() -> None:
    error = check_refusal(3, prompt_logprobs=0)
    assert str(error) == "prompt_logprobs works from v0.4 on: leave it out, or use v0.4."
    assert error.param == "prompt_logprobs"
    params = SamplingParams(prompt_logprobs=0)
    check_request(3, params, vocab_size=272, max_model_len=64, scores_prompts=True)


@pytest.mark.parametrize("value", [1.5, "16", True, 16.0, [16]])
def test_len_2_max_tokens_that_is_no_integer_is_refused(value: object) -> None:
    error = refusal(max_tokens=value)
    assert str(error) == f"max_tokens must be an integer, got {value!r}."
    assert error.param == "max_tokens"


def test_len_2_max_tokens_beyond_any_context_is_refused_with_the_request() -> None:
    error = check_refusal(8, max_tokens=2147483648)
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert "2147483648" in str(error)
    assert "2147483656" in str(error)


@pytest.mark.parametrize("num_prompt_tokens", [64, 65, 1000])
def test_len_3_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_prompt_tokens: int) -> None:
    error = check_refusal(num_prompt_tokens, max_tokens=None)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert f"{num_prompt_tokens} tokens" in str(error)
    assert "64 tokens" in str(error)


def test_len_3_the_longest_prompt_leaves_one_token() -> None:
    check(63, max_tokens=1)
    check(63, max_tokens=None)


def test_len_5_prompt_and_max_tokens_together_are_refused_with_the_true_numbers() -> None:
    error = check_refusal(8, max_tokens=60)
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert str(error) == (
        "The prompt has 8 tokens and max_tokens asks for 60 more: together 68, "
        "but the context holds 64 tokens (max_model_len): lower max_tokens."
    )


def test_len_5_prompt_and_max_tokens_may_fill_the_context() -> None:
    check(8, max_tokens=56)
    assert check_refusal(8, max_tokens=57).param == "max_tokens"


def test_len_8_min_tokens_above_max_tokens_is_refused() -> None:
    error = refusal(min_tokens=5, max_tokens=4)
    assert str(error) == "min_tokens (5) must not be above max_tokens (4)."
    assert error.param == "min_tokens"
    assert refusal(min_tokens=17).param == "min_tokens"  # against the default of 16
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


def test_len_8_min_tokens_beyond_the_context_is_refused() -> None:
    error = check_refusal(8, min_tokens=57, max_tokens=None)
    assert (error.param, error.code) == ("min_tokens", "context_length_exceeded")
    assert "57" in str(error)
    check(8, min_tokens=56, max_tokens=None)


# Stop strings


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (None, ()),
        ([], ()),
        ("\n", ("\n",)),
        ("abc", ("abc",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        (["1", "2", "3", "4", "5"], ("1", "2", "3", "4", "5")),
    ],
)
def test_stp_6_stop_takes_null_a_string_and_lists_of_any_length(stop: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == kept


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_stp_6_an_empty_stop_string_is_refused(stop: Any) -> None:
    error = refusal(stop=stop)
    assert "empty string" in str(error)
    assert error.param == "stop"


@pytest.mark.parametrize("stop", [5, True, [5], ["a", None], {"a": 1}, b"a"])
def test_stp_6_what_is_no_string_is_refused(stop: Any) -> None:
    assert refusal(stop=stop).param == "stop"


# Ranges


@pytest.mark.parametrize("value", [-0.1, 2.1, -1e-9, 1000])
def test_smp_8_a_temperature_out_of_range_is_refused(value: float) -> None:
    error = refusal(temperature=value)
    bound = "at least 0 and at most 2"
    assert str(error) == f"temperature must be {bound}, got {value!r}."
    assert error.param == "temperature"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "hot", True, None, 10**400])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_smp_8_what_is_no_finite_number_is_refused(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert str(error).startswith(f"{name} must be a finite number, got ")
    assert error.param == name


@pytest.mark.parametrize("value", [0, 0.0, 2, 2.0, 1e-12, 0.7])
def test_smp_8_a_temperature_in_range_is_kept(value: float) -> None:
    assert SamplingParams(temperature=value).temperature == value


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 1e-12, "top_p": 0.5}, True),
        ({"temperature": 1e-4}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
        ({"top_k": -1}, False),
        ({"top_p": 1e-9}, False),
    ],
)
def test_smp_9_what_counts_as_greedy(params: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**params).is_greedy is greedy


@pytest.mark.parametrize("value", [-1, 0, 1, 277, 10**30])
def test_smp_9_top_k_from_minus_one_up_is_taken(value: int) -> None:
    assert SamplingParams(top_k=value).top_k == value


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("top_k", [-2, -100], "at least -1"),
        ("top_p", [0, 0.0, -0.5, 1.01], "above 0 and at most 1"),
        ("min_p", [-0.1, 1.1], "at least 0 and at most 1"),
        ("n", [0, -1, 129], "at least 1 and at most 128"),
        ("min_tokens", [-1], "at least 0"),
        ("logprobs", [-1, 21], "at least 0 and at most 20"),
        ("prompt_logprobs", [-1, 21], "at least 0 and at most 20"),
        ("presence_penalty", [-2.1, 2.1], "at least -2 and at most 2"),
        ("frequency_penalty", [-2.1, 2.1], "at least -2 and at most 2"),
        ("repetition_penalty", [0, 0.0, -1], "above 0"),
    ],
)
def test_smp_9_what_is_out_of_range_is_refused_with_range_and_value(name: str, bad: list[Any], words: str) -> None:
    for value in bad:
        error = refusal(**{name: value})
        assert str(error) == f"{name} must be {words}, got {value!r}."
        assert error.param == name


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"n": 128},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 0.01},
        {"seed": -(2**70)},
        {"seed": 0},
    ],
)
def test_the_ends_of_the_ranges_are_taken(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    assert {name: getattr(made, name) for name in params} == params


@pytest.mark.parametrize("value", [0, 1, 20, None])
def test_lgp_4_up_to_twenty_alternatives_are_taken(value: int | None) -> None:
    assert SamplingParams(logprobs=value).logprobs == value


def test_lgp_4_more_than_twenty_alternatives_are_refused() -> None:
    error = refusal(logprobs=21)
    assert str(error) == "logprobs must be at least 0 and at most 20, got 21."
    assert error.param == "logprobs"


@pytest.mark.parametrize("value", [True, False, "1", 1.0, 1.5, math.nan, [1]])
@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs"])
def test_what_is_no_integer_is_refused(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert str(error) == f"{name} must be an integer, got {value!r}."
    assert error.param == name


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens"])
def test_null_is_refused_where_there_is_no_unset(name: str) -> None:
    assert refusal(**{name: None}).param == name


@pytest.mark.parametrize("value", [1, 0, "true", None])
@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"])
def test_what_is_no_boolean_is_refused(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert str(error) == f"{name} must be true or false, got {value!r}."
    assert error.param == name


# Token ids


@pytest.mark.parametrize("ids", [None, [], ()])
def test_stop_token_ids_may_be_left_out(ids: Any) -> None:
    assert SamplingParams(stop_token_ids=ids).stop_token_ids == ()


@pytest.mark.parametrize("ids", [5, "5", ["5"], [5.0], [True], [None], {5: 1}])
def test_stop_token_ids_that_are_no_integers_are_refused(ids: Any) -> None:
    assert refusal(stop_token_ids=ids).param == "stop_token_ids"


def test_logit_bias_takes_the_string_keys_of_json() -> None:
    assert SamplingParams(logit_bias={"50": 5, 7: -100, "0": 1.5}).logit_bias == {50: 5.0, 7: -100.0, 0: 1.5}  # type: ignore[dict-item]
    assert SamplingParams(logit_bias={}).logit_bias is None


@pytest.mark.parametrize("key", ["", "a", "1.5", "1e3", " 5", "1_0", "٣", "9" * 5000, 1.0, 1.5, math.inf, True, None])
def test_logit_bias_with_a_key_that_is_no_id_is_refused(key: Any) -> None:
    error = refusal(logit_bias={key: 1.0})
    assert "is no token id" in str(error)
    assert error.param == "logit_bias"


@pytest.mark.parametrize("bias", [-100.1, 100.1, math.nan, math.inf, "1", True, None])
def test_logit_bias_with_a_bias_out_of_range_is_refused(bias: Any) -> None:
    assert refusal(logit_bias={1: bias}).param == "logit_bias"


@pytest.mark.parametrize("logit_bias", [5, 0, "", [], [5], "5", False])
def test_logit_bias_that_is_no_mapping_is_refused(logit_bias: Any) -> None:
    assert refusal(logit_bias=logit_bias).param == "logit_bias"


@pytest.mark.parametrize(
    ("params", "name", "bad"),
    [
        ({"stop_token_ids": [999999]}, "stop_token_ids", 999999),
        ({"stop_token_ids": [5, 272]}, "stop_token_ids", 272),
        ({"stop_token_ids": [-1]}, "stop_token_ids", -1),
        ({"logit_bias": {"999999": 5}}, "logit_bias", 999999),
        ({"logit_bias": {272: 5}}, "logit_bias", 272),
        ({"logit_bias": {"-1": 5}}, "logit_bias", -1),
    ],
)
def test_api_9_ids_out_of_vocabulary_are_refused(params: dict[str, Any], name: str, bad: int) -> None:
    error = check_refusal(8, **params)
    assert str(error) == f"{name} has token id {bad}, which is out of vocabulary: ids go from 0 to 271."
    assert error.param == name


def test_api_9_the_ends_of_the_vocabulary_are_taken() -> None:
    check(8, stop_token_ids=[0, 271], logit_bias={0: 1.0, 271: 1.0})


# What ends a request


def test_eos_1_every_end_token_stops_and_only_the_primary_has_no_stop_reason() -> None:
    ids = (128001, 128008, 128009)
    assert state([5, 128009], eos=ids).finish_reason(64) == ("stop", 128009)
    assert state([5, 128008], eos=ids).finish_reason(64) == ("stop", 128008)
    assert state([5, 128001], eos=ids).finish_reason(64) == ("stop", None)
    assert state([128001, 5], eos=ids).finish_reason(64) is None  # only the last token counts


def test_stp_9_stop_token_ids_stop_beside_the_models_own() -> None:
    assert state([72], stop_token_ids=[72]).finish_reason(64) == ("stop", 72)
    assert state([EOT], stop_token_ids=[72]).finish_reason(64) == ("stop", EOT)
    assert state([73], stop_token_ids=[72]).finish_reason(64) is None


def test_the_primary_end_token_has_no_stop_reason_although_the_caller_names_it() -> None:
    assert state([EOS], stop_token_ids=[EOS, EOT]).finish_reason(64) == ("stop", None)


def test_len_8_ignore_eos_leaves_only_the_callers_stop_token_ids() -> None:
    assert state([EOS], ignore_eos=True).finish_reason(64) is None
    assert state([EOT], ignore_eos=True).finish_reason(64) is None
    assert state([EOT], ignore_eos=True, stop_token_ids=[EOT]).finish_reason(64) == ("stop", EOT)
    assert state([EOS], ignore_eos=True, stop_token_ids=[EOS]).finish_reason(64) == ("stop", EOS)
    assert state([EOS] * 6, ignore_eos=True, max_tokens=6).finish_reason(64) == ("length", None)


def test_len_8_no_end_token_counts_before_min_tokens() -> None:
    assert [state([65] * k + [EOT], min_tokens=4).finish_reason(64) for k in range(5)] == [
        None,
        None,
        None,
        ("stop", EOT),
        ("stop", EOT),
    ]


def test_max_tokens_ends_a_request_as_length() -> None:
    assert [state([65] * k, max_tokens=3).finish_reason(64) for k in (1, 2, 3)] == [None, None, ("length", None)]


def test_the_end_token_beats_max_tokens_when_both_come_at_once() -> None:
    assert state([65, 65, EOT], max_tokens=3).finish_reason(64) == ("stop", EOT)
    assert state([65, EOS], max_tokens=None).finish_reason(5) == ("stop", None)


def test_a_request_ends_when_prompt_and_output_fill_the_context() -> None:
    found = [state([65] * k, prompt=5, max_tokens=None).finish_reason(8) for k in (1, 2, 3)]
    assert found == [None, None, ("length", None)]


def test_a_model_without_end_tokens_runs_to_its_length() -> None:
    assert state([EOS], eos=()).finish_reason(64) is None
    assert state([7], eos=(), stop_token_ids=[7]).finish_reason(64) == ("stop", 7)


def test_a_state_shares_the_lists_of_its_request() -> None:
    prompt = [1, 2]
    made = SamplingState.create(SamplingParams(), prompt, [EOS], seed=3)
    assert made.prompt_token_ids is prompt
    assert (made.seed, made.output_token_ids) == (3, [])


def test_unt_2_ids_are_checked_once_for_many_prompts_and_threads() -> None:
    class Counted(LogitBias):
        num_reads = 0

        def __iter__(self) -> Any:
            Counted.num_reads += 1
            return super().__iter__()

    params = SamplingParams(logit_bias={1: 1.0})
    object.__setattr__(params, "logit_bias", Counted(params.logit_bias or {}))
    for _ in range(3):
        check_request(4, params, vocab_size=300, max_model_len=64)
    assert Counted.num_reads == 1
    with pytest.raises(RequestError, match="out of vocabulary"):
        check_request(4, params, vocab_size=1, max_model_len=64)
    with pytest.raises(RequestError, match="out of vocabulary"):
        check_request(4, params, vocab_size=1, max_model_len=64)


def test_unt_60_min_tokens_above_the_default_says_that_it_is_the_default() -> None:
    assert str(refusal(min_tokens=17)) == "min_tokens (17) must not be above max_tokens (16, which it is unless given)."
