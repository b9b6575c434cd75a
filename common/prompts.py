"""What callers give as prompts, in one form: text or token ids, one or many. Torch-free, changes in no milestone."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from common.errors import RequestError, shown
from common.sampling_params import SamplingParams, check_token_ids

Prompt = str | list[int]
T = TypeVar("T")


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        ...


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a flat list of integers is *one* prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts must be text, token ids, or a list of either, got {type(prompts).__name__}.", param="prompt"
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def as_conversations(messages: object) -> list[object]:
    """One conversation or many, as a list; what is no list of lists is one, which `normalize_messages` may refuse."""
    if isinstance(messages, list | tuple) and messages and all(isinstance(item, list | tuple) for item in messages):
        return list(messages)
    return [messages]


def encode(prompt: Prompt, tokenizer: Encoder, vocab_size: int) -> list[int]:
    """Token ids of a prompt: text gets the model's special tokens (BOS, where it has one), ids get nothing added.

    Raises:
        RequestError: it is empty, of another type, or has an id outside the model's `vocab_size`.
    """
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list | tuple) and all(type(item) is int for item in prompt):
        token_ids = list(prompt)
    else:
        raise RequestError(f"A prompt must be text or a list of token ids, got {shown(prompt)}.", param="prompt")
    if not token_ids:
        raise RequestError("The prompt is empty: it needs at least one token.", param="prompt")
    # Text, too: a tokenizer may have added tokens for which the model has no embedding.
    check_token_ids("prompt", token_ids, vocab_size)
    return token_ids


def params_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One `SamplingParams` for each prompt: the same for all, or a list of as many."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if not isinstance(sampling_params, list | tuple) or not all(isinstance(p, SamplingParams) for p in sampling_params):
        raise RequestError(f"sampling_params must be SamplingParams, or a list of them, got {shown(sampling_params)}.")
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"There are {num_prompts} prompts but {len(sampling_params)} sampling_params: give one, or one for each."
        )
    return list(sampling_params)


def for_each(function: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """`function` of each prompt, with what belongs to it in further columns; an error among several says of which."""
    rows = list(zip(*columns, strict=True))
    results = []
    for number, row in enumerate(rows, 1):
        try:
            results.append(function(*row))
        except RequestError as error:
            if len(rows) == 1:
                raise
            message = f"Prompt {number} of {len(rows)}: {error}"
            raise RequestError(message, param=error.param, code=error.code) from None
    return results
