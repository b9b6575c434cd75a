"""llama-index: its class for servers that are like OpenAI's."""

import asyncio

import openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from scenario import Server, equal, main, raises, works


def model_of(server: Server, *, is_chat_model: bool, **more) -> OpenAILike:
    options = {"model": server.model, "api_base": server.api, "api_key": "none", "temperature": 0, "max_retries": 0}
    return OpenAILike(max_tokens=server.max_tokens, is_chat_model=is_chat_model, **options | more)


@works("`OpenAILike`: chat, stream, async; exceptions of `openai`", "`is_chat_model=True`, `api_base`")
def chat(server: Server) -> None:
    model = model_of(server, is_chat_model=True)
    messages = [ChatMessage(role="user", content=server.question)]
    answer = model.chat(messages)
    equal(answer.message.content, server.chat_text, "text")
    usage = answer.raw.usage
    equal([usage.prompt_tokens, usage.completion_tokens], server.chat_usage, "usage")
    equal("".join(part.delta or "" for part in model.stream_chat(messages)), server.chat_text, "streamed text")
    equal(asyncio.run(model.achat(messages)).message.content, server.chat_text, "async text")
    equal(model.complete(server.question).text, server.chat_text, "complete() by the chat route")
    with raises(openai.NotFoundError, "The model 'gpt-x' does not exist"):
        model_of(server, is_chat_model=True, model="gpt-x").chat(messages)


@works("`OpenAILike` (completions)", "`api_base`")
def completions(server: Server) -> None:
    model = model_of(server, is_chat_model=False)
    equal(model.complete(server.prompt).text, server.completion_text, "text")
    parts = list(model.stream_complete(server.prompt))
    equal("".join(part.delta or "" for part in parts), server.completion_text, "streamed text")


main()
