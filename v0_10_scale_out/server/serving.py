"""What the routes do: from a checked body to the engine, and from its stream to an HTTP response.

    body ─▶ check ─▶ tokenise ─▶ submit ─▶ RequestStream ─▶ events (SSE), or one body
            400, 404  400         400, 503                   an error within the stream, or 4xx and 5xx

Everything that can be wrong with a request is found before the first byte of its answer. Whoever leaves early, before
or within an answer, has his request aborted.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.chat import normalize_messages
from common.errors import RequestError, shown
from common.prompts import as_list, encode, for_each
from common.sampling_params import SamplingParams, check_token_ids

from ..async_engine import AsyncEngine, EngineDeadError, RequestFailedError, RequestStream, UnavailableError
from .answers import Answer, ChatAnswer, Extras
from .bodies import SMALL
from .completion_answers import CompletionAnswer
from .echo import Echo, check_scores
from .errors import ClientGoneError, UnknownModelError, describe
from .limits import Limits
from .protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest
from .responses import ModelCard, Text, Tokens, respond, to_json
from .totals import Totals

T = TypeVar("T")
Input = tuple[str | None, list[int]]  # a prompt's text, where there was one, and its token ids
PING_SECONDS = 15  # between comments that keep proxies from closing a connection on which nothing comes


@dataclass
class Serving:
    """The model as clients see it.

    Args:
        engine: started by the application.
        names: what the model is served as; the first one is its own.
        root: where it was loaded from.
        defaults: sampling parameters for requests that leave them out.
    """

    engine: AsyncEngine
    names: list[str]
    root: str
    defaults: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.tokenizer = self.engine.engine.tokenizer
        self.limits = Limits(self.tokenizer, self.engine.engine.max_model_len)

    def models(self) -> list[ModelCard]:
        """One card for each name."""
        return [
            ModelCard(
                id=name,
                object="model",
                created=self.created,
                owned_by="mini-vllm",
                root=self.root,
                max_model_len=self.engine.engine.max_model_len,
            )
            for name in self.names
        ]

    def model(self, name: str | None) -> ModelCard:
        """The card of that name, or of the first one without; raises `UnknownModelError`."""
        for card in self.models():
            if name in (None, card["id"]):
                return card
        raise UnknownModelError(f"The model {shown(name)} does not exist: this server has {', '.join(self.names)}.")

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        name, params = await self._checked(body, request)
        self.engine.check_available(params.n)  # before any work is done for it
        tokenized = self.engine.tokenize(self._chat_token_ids, *body.template_arguments())
        token_ids = await _unless_gone(request, tokenized)
        check_scores(len(token_ids), {"prompt_logprobs": body.prompt_logprobs})
        num_top, totals = body.top_logprobs or 0, Totals(1, params.n)
        answer = ChatAnswer(_new_id("chatcmpl"), name, totals, num_top, self.tokenizer, _extras(body))
        said = normalize_messages(body.messages[-1:])[0]["content"]  # what those who watch are shown of it
        return await self._answer(answer, [(said, token_ids)], params, body, request)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        name, params = await self._checked(body, request)
        self.engine.check_available(params.n)
        inputs = await _unless_gone(request, self.engine.tokenize(self._encode, body.prompt, params))
        num_tokens = sum(len(token_ids) for _, token_ids in inputs) * params.n  # each choice repeats its prompt's
        scores = {"prompt_logprobs": body.prompt_logprobs, "logprobs": body.logprobs if body.echo else None}
        check_scores(num_tokens, scores)
        echoes = await self.engine.tokenize(self._echoes, inputs, body) if body.echo else [Echo()] * len(inputs)
        totals, hidden = Totals(len(inputs), params.n), params.skip_special_tokens
        answer = CompletionAnswer(_new_id("cmpl"), name, totals, echoes, self.tokenizer, hidden, _extras(body))
        return await self._answer(answer, inputs, params, body, request)

    async def tokenize(self, body: TokenizeRequest) -> Tokens:
        """POST /tokenize."""
        self.model(body.model)
        body.check_extra_fields()
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give a prompt or messages, one of the two.", param="prompt")
        if body.prompt is not None:
            add_special_tokens = body.add_special_tokens is not False
            self.limits.check_text(body.prompt, "prompt")
            token_ids = await self.engine.tokenize(self.tokenizer.encode, body.prompt, add_special_tokens)
        else:
            token_ids = await self.engine.tokenize(self._chat_token_ids, *body.template_arguments())
        return Tokens(
            count=len(token_ids),
            max_model_len=self.engine.engine.max_model_len,
            tokens=token_ids,
            token_strs=await self.engine.tokenize(self.tokenizer.pieces, token_ids) if body.return_token_strs else None,
        )

    async def detokenize(self, body: DetokenizeRequest) -> Text:
        """POST /detokenize."""
        self.model(body.model)
        body.check_extra_fields()
        return Text(prompt=await self.engine.tokenize(self._decode, body.tokens))

    async def _checked(
        self, body: ChatCompletionRequest | CompletionRequest, request: Request
    ) -> tuple[str, SamplingParams]:
        """`_check`, in a thread for a body that may have many thousands of fields or biases."""
        if len(await request.body()) <= SMALL:  # it has been read, and is still there
            return self._check(body)
        return await asyncio.to_thread(self._check, body)

    def _check(self, body: ChatCompletionRequest | CompletionRequest) -> tuple[str, SamplingParams]:
        """The name of the model, and the parameters; raises for what the body alone shows to be wrong."""
        name = self.model(body.model)["id"]
        for field_name, value in self.defaults.items():
            if field_name != "max_tokens" and getattr(body, field_name) is None:
                setattr(body, field_name, value)
        params = body.sampling_params()
        body.check_extra_fields()
        return name, params

    # In the tokenizer's thread, as they may take long:

    def _encode(self, prompt: Any, params: SamplingParams) -> list[Input]:
        """Text, where there was one, and token ids of each prompt."""
        prompts = as_list(prompt)
        if not prompts:
            raise RequestError("prompt is empty: give a text, token ids, or a list of either.", param="prompt")
        self.engine.check_available(len(prompts) * params.n)  # before work is done for it
        for_each(self.limits.check_prompt, prompts)
        vocab_size = self.engine.engine.model.config.vocab_size
        token_ids = for_each(lambda prompt: encode(prompt, self.tokenizer, vocab_size), prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return list(zip(texts, token_ids, strict=True))

    def _chat_token_ids(self, messages: Any, *arguments: Any) -> list[int]:
        """Of a chat with its template, whose tokens take the place of special ones."""
        self.limits.check_messages(messages)
        text = self.tokenizer.render_chat(messages, *arguments)
        self.limits.check_text(text, "messages")
        return self.tokenizer.encode(text, False, "messages")

    def _echoes(self, inputs: list[Input], body: CompletionRequest) -> list[Echo]:
        skip = body.skip_special_tokens is True  # unless asked for, ids are echoed as /detokenize shows them
        return [Echo.of(self.tokenizer, *prompt, skip_special_tokens=skip, num_top=body.logprobs) for prompt in inputs]

    def _decode(self, token_ids: Any) -> str:
        self.limits.check_ids(token_ids, "tokens")
        if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
            raise RequestError(f"tokens must be a list of token ids, got {shown(token_ids)}.", param="tokens")
        check_token_ids("tokens", token_ids, self.engine.engine.vocab_size)
        return self.tokenizer.decode(token_ids, False)

    async def _answer(
        self, answer: Answer, inputs: list[Input], params: SamplingParams, body: Generation, request: Request
    ) -> Response:
        """Submit, and answer in the form that was asked for."""
        most = self.defaults.get("max_tokens")
        if params.max_tokens is None and most is not None:  # it shortens an answer, and refuses no prompt
            room = self.engine.engine.max_model_len - max(len(token_ids) for _, token_ids in inputs)
            params = replace(params, max_tokens=max(min(most, room), params.min_tokens, 1))
        with body.callers_words():
            stream = self.engine.submit(answer.id, inputs, params, request.state.arrival_time, body.cache_salt)
        request.state.answer, request.state.stream = answer, stream  # for the log
        if body.stream:
            return _EventStream(stream, _events(stream, answer, body.include_usage))
        try:
            await _unless_gone(request, _collect(stream, answer.totals))
        except (RequestFailedError, EngineDeadError):
            answer.totals.failed = True
            raise
        finally:
            stream.close()
        # Log-probabilities are much to write, at times: not on the event loop.
        if params.logprobs is not None or answer.totals.prompt_logprobs:
            return await asyncio.to_thread(lambda: respond(answer.whole()))
        return respond(answer.whole())


class _EventStream(EventSourceResponse):
    """Server-sent events that end their request, however they end.

    Not the generator's affair: where the client has left before the first event, it is never started.
    """

    def __init__(self, stream: RequestStream, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, ping=PING_SECONDS, ping_message_factory=lambda: _event(comment="ping"))
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _events(stream: RequestStream, answer: Answer, include_usage: bool) -> AsyncIterator[bytes]:
    """The chunks, an error if there is one (the status has gone out as 200 already), and the end."""
    try:
        async for prompt_index, output in stream:
            answer.totals.add(prompt_index, output)
            chunks = [_event(to_json(chunk)).encode() for chunk in answer.chunks(prompt_index, output)]
            if chunks:
                yield b"".join(chunks)
        if include_usage:
            yield _event(to_json(answer.usage_chunk())).encode()
    except Exception as error:
        answer.totals.failed = not isinstance(error, UnavailableError)
        yield _event(to_json(describe(error)[1])).encode()
    yield _event("[DONE]").encode()


def _event(data: str | None = None, comment: str | None = None) -> ServerSentEvent:
    """With LF, which every client splits at; the library's own CRLF is not."""
    return ServerSentEvent(data, comment=comment, sep="\n")


async def _collect(stream: RequestStream, totals: Totals) -> None:
    async for prompt_index, output in stream:
        totals.add(prompt_index, output)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but give it up and raise `ClientGoneError` as soon as the client has left."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("The client has closed the connection.")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client has left; its body has been read, so that nothing else comes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _extras(body: Generation) -> Extras:
    return Extras(body.return_token_ids is True, body.continuous_usage, body.prompt_logprobs)


def _new_id(prefix: str) -> str:
    """Ours, whatever the client calls its request: two clients may choose the same name."""
    return f"{prefix}-{uuid.uuid4().hex}"
