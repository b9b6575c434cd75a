"""The bodies that clients send, and what becomes of each field. Responses are in `responses.py`.

Every field has one of three fates: it is used; it is refused, because it would change the answer and we cannot do it
(`fields.py`); or it is ignored, with a line in the log. `null` is always the same as leaving a field out. Ranges are
checked by `SamplingParams`, whose errors are put into the caller's words here.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from common.errors import RequestError, shown
from common.sampling_params import DEFAULT_MAX_TOKENS, MAX_LOGPROBS, MAX_STOPS, SamplingParams

from . import fields

logger = logging.getLogger(__name__)

MAX_SALT_LEN = 128  # vLLM's limit

MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "null"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type"],
                            "properties": {
                                "type": {"enum": ["text", "input_text", "output_text", "refusal"]},
                                "text": {"type": "string"},
                                "refusal": {"type": "string"},
                            },
                        },
                    },
                ]
            },
        },
    },
}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}

LOGIT_BIAS_SCHEMA = {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}
STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}

# What the checks behind say better than a schema could, so that the schema is for readers only.
Messages = Annotated[Any, WithJsonSchema(MESSAGES_SCHEMA)]
Prompts = Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
TokenIds = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
Stop = Annotated[Any, WithJsonSchema(STOP_SCHEMA)]
LogitBias = Annotated[Any, WithJsonSchema(LOGIT_BIAS_SCHEMA)]


@functools.cache
def _say_once(message: str) -> None:
    logger.info("%s", message)


class Body(BaseModel):
    """What all bodies share. Strict: `"16"`, `true` and `1.5` are no integers, although Python could make them one."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(default=None, description="the served model's name, as in GET /v1/models")

    def check_extra_fields(self) -> None:
        """Refuse the fields that would change the answer, and log those that are ignored.

        Raises:
            RequestError: with the field's name.
        """
        ignored = []
        harmless = fields.HARMLESS | self._harmless()
        for name, value in (self.model_extra or {}).items():
            if name in harmless:
                fields.check(name, value, harmless[name])
            elif value is not None:
                ignored.append(shown(name)[1:-1] + ("" if name in fields.KNOWN else " (unknown)"))
        if ignored:
            more = f" and {len(ignored) - 10} more" if len(ignored) > 10 else ""
            logger.info("ignored fields: %s%s", ", ".join(ignored[:10]), more)

    def _harmless(self) -> dict[str, tuple[Any, ...] | None]:
        """Values of refused fields that change nothing in this kind of body; `None` where no value does."""
        return {}


class ChatTurn(Body):
    """The part of a body that a chat template makes a prompt of."""

    messages: Messages = None
    add_generation_prompt: bool | None = Field(default=None, description="open an assistant's turn (default: true)")
    continue_final_message: bool | None = Field(default=None, description="go on with the last message instead")

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="what else the chat template reads")

    def template_arguments(self) -> tuple[Any, bool, bool, dict[str, Any]]:
        """`Tokenizer.chat_token_ids`'s. Going on with a message opens no turn, unless both are asked for (a 400)."""
        goes_on = self.continue_final_message is True
        opens = not goes_on if self.add_generation_prompt is None else self.add_generation_prompt
        return self.messages, opens, goes_on, self.chat_template_kwargs or {}


class StreamOptions(BaseModel):
    """What a stream says besides the answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(default=None, description="send the token counts in a last chunk of their own")
    continuous_usage_stats: bool | None = Field(
        default=None, description="with include_usage: and in every chunk its choice's, so far"
    )
    include_obfuscation: bool | None = Field(default=None, description="accepted, but there is nothing to obfuscate")


class Generation(Body):
    """What chat and completions share."""

    max_tokens: int | None = Field(
        default=None, description="most tokens to generate (default: 16 for completions, for chats what fits)"
    )
    min_tokens: int | None = Field(default=None, description="no end of any kind before so many tokens")
    n: int | None = Field(default=None, description="number of answers, 1 to 128")
    temperature: float | None = Field(default=None, description="0 (the likeliest token) to 2 (default: 1)")
    top_p: float | None = Field(default=None, description="above 0, at most 1")
    top_k: int | None = Field(default=None, description="0 or -1 keeps all tokens")
    min_p: float | None = Field(default=None, description="0 to 1")
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="the same seed gives the same answer; 64 bits with a sign"
    )
    stop: Stop = Field(default=None, description="end before one of these texts")
    stop_token_ids: list[int] | None = Field(
        default=None, max_length=MAX_STOPS, description="end at one of these tokens"
    )
    ignore_eos: bool | None = Field(default=None, description="go on past the model's end tokens")
    presence_penalty: float | None = Field(default=None, description="-2 to 2")
    frequency_penalty: float | None = Field(default=None, description="-2 to 2")
    repetition_penalty: float | None = Field(default=None, description="above 0; 1 changes nothing")
    logit_bias: LogitBias = Field(default=None, description="token id to -100 to 100")
    prompt_logprobs: int | None = Field(
        default=None, description=f"score the prompt, with so many likely tokens at each place, 0 to {MAX_LOGPROBS}"
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = Field(default=None, description="answer as server-sent events, as the text is written")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(default=None, description="give the prompt's and the answer's token ids, too")
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SALT_LEN,
        description="share cached prompts only with requests that send the same: how fast an answer comes tells others "
        "nothing then",
    )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the token counts so far: as in vLLM, only where the stream ends with them, too."""
        return self.include_usage and self.stream_options.continuous_usage_stats is True  # type: ignore[union-attr]

    @contextlib.contextmanager
    def callers_words(self) -> Iterator[None]:
        """Give `RequestError`s the names of parameters that this body has."""
        try:
            yield
        except RequestError as error:
            names, text = self._theirs(), str(error)
            for ours, theirs in names.items():
                if ours != "prompt":  # which is an English word, too
                    text = re.sub(rf"\b{ours}\b", theirs, text)
            param = names.get(error.param or "", error.param)
            raise RequestError(text, param=param, code=error.code) from None

    def _theirs(self) -> dict[str, str]:
        """Our name of a parameter -> the caller's, where they differ."""
        return {}

    def _sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The fields that both kinds of request have, with these three, which differ."""
        self._check_stream_options()
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not available with stream: true.", param="prompt_logprobs")
        names = {
            "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
            "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "include_stop_str_in_output",
            "skip_special_tokens",
        }  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        with self.callers_words():
            return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)

    def _check_stream_options(self) -> None:
        options = self.stream_options
        if options is None:
            return
        asked = [name for name, value in options if value not in (None, False)]
        if asked and not self.stream:
            raise RequestError("stream_options needs stream: true.", param="stream_options")
        for name in asked:
            if name not in StreamOptions.model_fields:
                raise RequestError(f"stream_options.{shown(name)[1:-1]} is not supported.", param="stream_options")
        if options.include_obfuscation:
            _say_once("stream_options.include_obfuscation: nothing to obfuscate, chunks go out as they are")

    def _harmless(self) -> dict[str, tuple[Any, ...] | None]:
        return {"best_of": (1 if self.n is None else self.n,)}  # of so many answers the best so many are all


class ChatCompletionRequest(Generation, ChatTurn):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, description="the newer name of max_tokens; it wins")
    logprobs: bool | None = Field(default=None, description="report the log-probability of every token")
    top_logprobs: int | None = Field(default=None, description=f"and of so many likely ones, 0 to {MAX_LOGPROBS}")

    def sampling_params(self) -> SamplingParams:
        """Without a limit the answer may fill the context."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        num_scores = None if limit == 0 else self.prompt_logprobs  # 0 is for `echo`, which a chat has not
        return self._sampling_params(max_tokens=limit, logprobs=logprobs, prompt_logprobs=num_scores)

    def _harmless(self) -> dict[str, tuple[Any, ...] | None]:
        return super()._harmless() | {"add_special_tokens": (False,)}  # the template prints the special tokens

    def _theirs(self) -> dict[str, str]:
        names = {"logprobs": "top_logprobs", "prompt": "messages"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = Field(default=None, description="put the prompt before the answer")
    logprobs: int | None = Field(default=None, description=f"report so many likely tokens, 0 to {MAX_LOGPROBS}")

    def sampling_params(self) -> SamplingParams:
        """Without a limit 16 tokens, as OpenAI's; `null` may fill the context (vLLM's takes it for 16)."""
        limit = self.max_tokens if "max_tokens" in self.model_fields_set else DEFAULT_MAX_TOKENS
        if "max_tokens" not in self.model_fields_set and (self.min_tokens or 0) > DEFAULT_MAX_TOKENS:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens, which was not sent and is {DEFAULT_MAX_TOKENS} "
                "by default: send max_tokens, too.",
                param="min_tokens",
            )
        num_scores = None if limit == 0 and not self.echo else self.prompt_logprobs
        if self.echo and (self.logprobs is not None or limit == 0) and (num_scores is None or num_scores >= 0):
            num_scores = max(num_scores or 0, self.logprobs or 0)  # what is echoed has log-probabilities, too
        return self._sampling_params(max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=num_scores)

    def _harmless(self) -> dict[str, tuple[Any, ...] | None]:
        return super()._harmless() | {"add_special_tokens": (True,)}


class TokenizeRequest(ChatTurn):
    """POST /tokenize: a text, or a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = Field(default=None, description="with a prompt: add the BOS (default: true)")
    return_token_strs: bool | None = None

    def _harmless(self) -> dict[str, tuple[Any, ...] | None]:
        return {"max_completion_tokens": None, "top_logprobs": None}  # a chat's: whoever counts may send the whole body


class ControlRequest(Body):
    """POST /events/control."""

    paused: bool | None = None
    steps: int | None = Field(default=None, ge=1, le=1000, description="make so many steps, though it is paused")
    delay: float | None = Field(default=None, ge=0, le=10, description="seconds from one step to the next")


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: TokenIds
