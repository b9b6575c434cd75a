"""Prompts in every form that a caller may use, and what is refused."""

from typing import Any

import pytest

from common.errors import RequestError
from common.prompts import as_list, encode, for_each, params_for_each
from common.sampling_params import SamplingParams

BOS = 256


class Bytes:
    """A tokenizer of bytes; `bos` goes before every text that asks for special tokens."""

    vocab_size = 259

    def __init__(self, bos: bool) -> None:
        self.bos = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self.bos and add_special_tokens) + [*text.encode()]


WITH_BOS, WITHOUT_BOS = Bytes(bos=True), Bytes(bos=False)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("Hi", ["Hi"]),
        ("", [""]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        (("Hi", "Ho"), ["Hi", "Ho"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2, 3), [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[1, 2], "Hi"], [[1, 2], "Hi"]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_one_prompt_or_many_become_a_list(prompts: Any, expected: list[Any]) -> None:
    assert as_list(prompts) == expected


def test_the_callers_own_list_is_not_handed_on() -> None:
    ids, texts = [1, 2], ["a"]
    assert as_list(ids)[0] is not ids
    assert as_list(texts) is not texts
    assert encode(ids, WITH_BOS, 272) is not ids


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "Hi"}, b"Hi", {1, 2}])
def test_what_is_no_prompt_at_all_is_refused(prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"got {type(prompts).__name__}") as caught:
        as_list(prompts)
    assert caught.value.param == "prompt"


def test_text_gets_the_models_special_tokens_and_ids_get_nothing() -> None:
    assert encode("Hi", WITH_BOS, 272) == [BOS, 72, 105]
    assert encode("Hi", WITHOUT_BOS, 272) == [72, 105]
    assert encode([72, 105], WITH_BOS, 272) == [72, 105]
    assert encode((72, 105), WITH_BOS, 272) == [72, 105]  # type: ignore[arg-type]


def test_api_10_an_empty_text_is_one_token_where_there_is_a_bos_and_refused_where_there_is_none() -> None:
    assert encode("", WITH_BOS, 272) == [BOS]
    for prompt, tokenizer in (("", WITHOUT_BOS), ([], WITH_BOS), ((), WITH_BOS)):
        with pytest.raises(RequestError, match="The prompt is empty") as caught:
            encode(prompt, tokenizer, 272)  # type: ignore[arg-type]
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("bad", [-1, 272, 999999])
def test_api_9_ids_out_of_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(RequestError) as caught:
        encode([5, bad], WITH_BOS, 272)
    assert str(caught.value) == f"prompt has token id {bad}, which is out of vocabulary: ids go from 0 to 271."
    assert caught.value.param == "prompt"


def test_api_9_every_id_of_the_model_is_taken_although_the_tokenizer_has_fewer() -> None:
    assert encode([0, 271], WITH_BOS, 272) == [0, 271]


@pytest.mark.parametrize("prompt", [None, 5, [1.0], [True], [1, "a"], ["a"], [[1]], {"a": 1}, b"Hi"])
def test_what_is_neither_text_nor_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="must be text or a list of token ids") as caught:
        encode(prompt, WITH_BOS, 272)
    assert caught.value.param == "prompt"


def test_a_long_wrong_prompt_is_not_repeated_in_full() -> None:
    with pytest.raises(RequestError) as caught:
        encode(["a" * 10_000], WITH_BOS, 272)  # type: ignore[list-item]
    assert len(str(caught.value)) < 200


def test_params_are_the_same_for_all_or_one_for_each() -> None:
    first, second = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert params_for_each(None, 2) == [SamplingParams(), SamplingParams()]
    assert params_for_each(first, 3) == [first, first, first]
    assert params_for_each([first, second], 2) == [first, second]
    assert params_for_each((second, first), 2) == [second, first]
    assert params_for_each(first, 0) == []
    assert params_for_each([], 0) == []


@pytest.mark.parametrize("num_prompts", [0, 1, 3])
def test_another_number_of_params_than_prompts_is_refused(num_prompts: int) -> None:
    with pytest.raises(RequestError, match=f"There are {num_prompts} prompts but 2 sampling_params"):
        params_for_each([SamplingParams(), SamplingParams()], num_prompts)


@pytest.mark.parametrize("wrong", [{"temperature": 1}, [{}], "greedy", 5])
def test_sampling_params_of_another_type_are_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
        params_for_each(wrong, 1)


def test_an_error_among_several_prompts_says_which_one_it_was() -> None:
    def check(prompt: str, limit: int) -> int:
        if len(prompt) > limit:
            raise RequestError(f"{prompt} is too long.", param="prompt", code="context_length_exceeded")
        return len(prompt)

    assert for_each(check, ["a", "bc"], [1, 2]) == [1, 2]
    assert for_each(check, [], []) == []
    with pytest.raises(RequestError, match=r"^Prompt 2 of 3: abc is too long\.$") as error:
        for_each(check, ["a", "abc", "abcd"], [2, 2, 2])
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestError, match=r"^abc is too long\.$"):
        for_each(check, ["abc"], [2])
