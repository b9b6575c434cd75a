"""What a caller may ask of a request's sampling, and what ends a request. Torch-free.

`SamplingParams` has vLLM's names and defaults. It is checked as it is made, so that every later room may rely on it;
what needs the model to be known (token ids within its vocabulary, lengths within its context) is checked by
`check_request` when the request is added. Changes in no milestone: v0.4 builds one from an HTTP body.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import RequestError, shown
from common.outputs import TokenLogprobs

FinishReason = tuple[str, int | str | None]  # finish_reason and stop_reason, as CompletionOutput has them
DEFAULT_MAX_TOKENS = 16  # vLLM's, and OpenAI's for completions
MAX_LOGPROBS = 20  # OpenAI's and vLLM's limit for top_logprobs
MAX_N = 128  # OpenAI's limit; every choice takes memory of its own
MAX_STOPS = 1024  # of each kind; every step looks for all of them
MAX_STOP_LEN = 1024  # characters
TOKEN_ID = re.compile("-?[0-9]{1,19}")  # as a key of JSON
GREEDY_BELOW = 1e-5  # temperatures below it are 0: dividing by them would say nothing but argmax


class LogitBias(dict[int, float]):
    """A request's checked `logit_bias`, which never changes; it may be on every token of the vocabulary.

    So `memo` keeps what others have made of it or found out about it, lest they do it again for each choice and token.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        super().__init__(biases)
        self.memo: dict[Any, Any] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends; the names and defaults are vLLM's.

    Raises:
        RequestError: a value is out of its range; the message names the parameter, the range and the value.
    """

    n: int = field(default=1, metadata={"help": "number of completions of each prompt"})
    temperature: float = field(default=1.0, metadata={"help": "0 takes the most likely token, up to 2 flattens"})
    top_p: float = field(default=1.0, metadata={"help": "keep the smallest set of tokens with this much probability"})
    top_k: int = field(default=0, metadata={"help": "keep the k most likely tokens; 0 or -1 keeps all"})
    min_p: float = field(
        default=0.0, metadata={"help": "keep tokens at least this likely, relative to the likeliest one"}
    )
    max_tokens: int | None = field(
        default=DEFAULT_MAX_TOKENS, metadata={"help": "most tokens to generate; they must fit into the context"}
    )
    min_tokens: int = field(default=0, metadata={"help": "no end of any kind before this many tokens"})
    stop: str | Sequence[str] | None = field(default=(), metadata={"help": "end before this text (may be repeated)"})
    stop_token_ids: Sequence[int] | None = field(
        default=(), metadata={"help": "end at this token id (may be repeated)"}
    )
    ignore_eos: bool = field(default=False, metadata={"help": "generate on past the model's end tokens"})
    seed: int | None = None  # no flag: on a command line the engine's --seed decides
    presence_penalty: float = field(
        default=0.0, metadata={"help": "-2 to 2, subtracted once for a token in the output"}
    )
    frequency_penalty: float = field(
        default=0.0, metadata={"help": "-2 to 2, subtracted for each time a token is in the output"}
    )
    repetition_penalty: float = field(
        default=1.0, metadata={"help": "over 1 makes tokens of the prompt and the output less likely"}
    )
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None  # no flag: a command line prints text
    prompt_logprobs: int | None = None  # from v0.4 on; with it `max_tokens` may be 0, which only scores the prompt
    include_stop_str_in_output: bool = field(
        default=False, metadata={"help": "keep the stop string or end token in the text"}
    )
    skip_special_tokens: bool = field(default=True, metadata={"help": "leave special tokens out of the text"})

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most = shown(self.max_tokens) + (
                ", which it is unless given" if self.max_tokens == DEFAULT_MAX_TOKENS else ""
            )
            raise RequestError(
                f"min_tokens ({shown(self.min_tokens)}) must not be above max_tokens ({most}).",
                param="min_tokens",
            )
        if self.seed is not None:
            _integer("seed", self.seed)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, above_low=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {shown(getattr(self, name))}.", param=name)
        # One form inside, whatever the caller wrote: tuples, and a dict with integer keys.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, whatever the filters say."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(slots=True)
class SamplingState:
    """One request, as the sampler and the rules that end it see it.

    The lists are the request's own, not copies: they grow as tokens are appended. `end_token_ids` maps every id that
    ends this request to the `stop_reason` it gives, which is `None` for the model's first end token and the id itself
    for any other (as in vLLM); with `ignore_eos` only the caller's `stop_token_ids` are in it. `prompt_logprobs` grows
    as the prompt is scored, from its second token on; it is `None` where nobody has asked. `warned` is set once the log
    says that its logits are not finite.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    end_token_ids: dict[int, int | None]
    prompt_logprobs: list[TokenLogprobs] | None = None
    warned: bool = False

    @classmethod
    def create(
        cls, params: SamplingParams, prompt_token_ids: list[int], eos_token_ids: Sequence[int], seed: int
    ) -> "SamplingState":
        """Start with an empty output. `eos_token_ids` come from the model, the primary one first."""
        ends: dict[int, int | None] = {}
        if not params.ignore_eos:
            ends.update({token_id: token_id for token_id in eos_token_ids})
        ends.update({token_id: token_id for token_id in params.stop_token_ids or ()})
        if eos_token_ids and not params.ignore_eos:
            ends[eos_token_ids[0]] = None
        scores: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        return cls(params, seed, prompt_token_ids, [], ends, scores)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """`(finish_reason, stop_reason)` if the last output token ends the request, else `None`.

        The last position of the context is usable: a request ends once prompt and output fill `max_model_len`.
        """
        num_output = len(self.output_token_ids)
        if self.params.max_tokens == 0:  # whatever token the end of the prompt gave: nobody sees it
            return "length", None
        if num_output >= max(1, self.params.min_tokens) and self.output_token_ids[-1] in self.end_token_ids:
            return "stop", self.end_token_ids[self.output_token_ids[-1]]
        if num_output == self.params.max_tokens or len(self.prompt_token_ids) + num_output >= max_model_len:
            return "length", None
        return None


def check_request(
    num_prompt_tokens: int,
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    num_kv_tokens: int | None = None,
    scores_prompts: bool = False,
) -> None:
    """Refuse what this engine can never serve: too long, or with token ids that the model does not have.

    Args:
        num_prompt_tokens: length of the prompt.
        params: what was asked for it.
        vocab_size: the model's ids go from 0 to `vocab_size - 1`.
        max_model_len: the longest prompt plus output.
        num_kv_tokens: tokens that the whole KV pool holds, where it may be less.
        scores_prompts: whether this milestone computes `prompt_logprobs`.

    Raises:
        RequestError: with `code="context_length_exceeded"` for lengths.
    """
    if params.prompt_logprobs is not None and not scores_prompts:
        raise RequestError("prompt_logprobs works from v0.4 on: leave it out, or use v0.4.", param="prompt_logprobs")
    if num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"The prompt has {num_prompt_tokens} tokens, but the context holds {max_model_len} tokens (max_model_len) "
            "and needs room for at least one new one: shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and num_prompt_tokens + params.max_tokens > max_model_len:
        raise RequestError(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens asks for {shown(params.max_tokens)} more: "
            f"together {shown(num_prompt_tokens + params.max_tokens)}, but the context holds {max_model_len} tokens "
            "(max_model_len): lower max_tokens.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if num_prompt_tokens + params.min_tokens > max_model_len:
        raise RequestError(
            f"The prompt has {num_prompt_tokens} tokens and min_tokens asks for {shown(params.min_tokens)} more, but "
            f"the context holds {max_model_len} tokens (max_model_len).",
            param="min_tokens",
            code="context_length_exceeded",
        )
    # The last token is sampled and never computed, so it needs no room in the pool.
    num_new = max(params.max_tokens or 1, params.min_tokens)
    num_needed = num_prompt_tokens + num_new - 1
    if num_kv_tokens is not None and num_needed > num_kv_tokens:
        raise RequestError(
            f"The request needs KV for {num_needed} tokens ({num_prompt_tokens} of the prompt and {num_new} new ones, "
            f"less the last), but the whole KV pool holds {num_kv_tokens}: shorten the prompt, or lower max_tokens.",
            param="max_tokens" if num_prompt_tokens <= num_kv_tokens else "prompt",
            code="context_length_exceeded",
        )
    check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    if isinstance(params.logit_bias, LogitBias) and vocab_size not in params.logit_bias.memo:
        check_token_ids("logit_bias", params.logit_bias, vocab_size)
        params.logit_bias.memo[vocab_size] = "checked"


def check_token_ids(name: str, token_ids: Sequence[int] | Mapping[int, Any], vocab_size: int) -> None:
    """Raise a `RequestError` that names the first id outside `0 .. vocab_size - 1`."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} has token id {shown(token_id)}, which is out of vocabulary: ids go from 0 to "
                f"{vocab_size - 1}.",
                param=name,
            )


def _integer(name: str, value: object, low: int | None = None, high: int | None = None) -> None:
    # bool is an int to Python, but `"max_tokens": true` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {shown(value)}.", param=name)
    _in_range(name, value, low, high)


def _number(
    name: str, value: object, low: float | None = None, high: float | None = None, *, above_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise RequestError(f"{name} must be a finite number, got {shown(value)}.", param=name)
    _in_range(name, value, low, high, above_low=above_low)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond a float's range
        return False


def _in_range(name: str, value: float, low: float | None, high: float | None, *, above_low: bool = False) -> None:
    too_low = low is not None and (value < low or (above_low and value == low))
    if too_low or (high is not None and value > high):
        lower = "" if low is None else f"above {low:g}" if above_low else f"at least {low:g}"
        upper = "" if high is None else f"at most {high:g}"
        raise RequestError(
            f"{name} must be {' and '.join(filter(None, (lower, upper)))}, got {shown(value)}.", param=name
        )


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(string, str) for string in strings):
        raise RequestError(f"stop must be a string or a list of strings, got {shown(stop)}.", param="stop")
    if len(strings) > MAX_STOPS or any(len(string) > MAX_STOP_LEN for string in strings):
        raise RequestError(
            f"stop may hold {MAX_STOPS} strings of at most {MAX_STOP_LEN} characters: each step looks for all.",
            param="stop",
        )
    if "" in strings:
        raise RequestError("stop must not hold an empty string: it would match at once.", param="stop")
    return tuple(strings)


def _token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    ids = () if token_ids is None else token_ids
    if not isinstance(ids, list | tuple):
        raise RequestError(f"{name} must be a list of token ids, got {shown(token_ids)}.", param=name)
    if len(ids) > MAX_STOPS:
        raise RequestError(f"{name} may hold {MAX_STOPS} ids at most, got {len(ids)}.", param=name)
    for token_id in ids:
        _integer(name, token_id)
    return tuple(ids)


def _logit_bias(logit_bias: object) -> LogitBias | None:
    if logit_bias is None:
        return None
    if not isinstance(logit_bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {shown(logit_bias)}.", param="logit_bias")
    biases = {}
    for key, bias in logit_bias.items():
        # JSON has only string keys.
        if type(key) is not int and not (isinstance(key, str) and TOKEN_ID.fullmatch(key)):
            raise RequestError(f"logit_bias has the key {shown(key)}, which is no token id.", param="logit_bias")
        if type(bias) is not float or not -100.0 <= bias <= 100.0:  # else it is right, as it is for a whole vocabulary
            _number("logit_bias", bias, -100.0, 100.0)
        biases[int(key)] = float(bias)
    return LogitBias(biases) if biases else None
