"""OpenAI's own library."""

import asyncio

import openai
from scenario import Server, equal, main, raises, refused, works


def connect(server: Server, kind: type = openai.OpenAI):
    return kind(base_url=server.api, api_key="none", max_retries=0)


@works("`chat.completions` and `completions`: whole, streamed, async, usage, log-probabilities; its own exceptions")
def chat_and_completions(server: Server) -> None:
    client = connect(server)
    chat = {
        "model": server.model,
        "messages": server.messages,
        "temperature": 0,
        "max_completion_tokens": server.max_tokens,
    }
    answer = client.chat.completions.create(n=2, logprobs=True, top_logprobs=2, **chat)
    equal([choice.message.content for choice in answer.choices], [server.chat_text] * 2, "texts")
    equal(len(answer.choices[0].logprobs.content), server.max_tokens, "log-probabilities")
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **chat)
    *chunks, last = list(stream)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), server.chat_text, "streamed text")
    equal([last.usage.prompt_tokens, last.usage.completion_tokens], server.chat_usage, "usage")
    with client.chat.completions.stream(stop=["."], **chat) as helper:  # it takes an answer that was cut for an error
        text = helper.get_final_completion().choices[0].message.content
    equal(text, server.chat_text.partition(".")[0], "the helper's text, to its first full stop")

    completion = {"model": server.model, "prompt": server.prompt, "temperature": 0, "max_tokens": server.max_tokens}
    answer = client.completions.create(logprobs=1, **completion)
    equal(answer.choices[0].text, server.completion_text, "completion")
    equal(len(answer.choices[0].logprobs.tokens), server.max_tokens, "its log-probabilities")
    chunks = list(client.completions.create(stream=True, **completion))
    equal("".join(chunk.choices[0].text for chunk in chunks), server.completion_text, "streamed completion")
    equal([chunk.choices[0].finish_reason for chunk in chunks][-1], "length", "reason")

    equal([model.id for model in client.models.list()], [server.model], "models")
    asyncio.run(many(server, chat))
    with raises(openai.NotFoundError, "The model 'gpt-x' does not exist"):
        client.chat.completions.create(**chat | {"model": "gpt-x"})
    with raises(openai.BadRequestError, "temperature must be at least 0 and at most 2"):
        client.chat.completions.create(**chat | {"temperature": 3})


async def many(server: Server, chat: dict) -> None:
    async with connect(server, openai.AsyncOpenAI) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**chat) for _ in range(4)))
    equal({answer.choices[0].message.content for answer in answers}, {server.chat_text}, "async texts")


@refused("`responses.create`", saying="/v1/responses")
def responses(server: Server) -> None:
    connect(server).responses.create(model=server.model, input=server.question)


@refused("tools", saying="tools is not supported: there are no tools.")
def tools(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    connect(server).chat.completions.create(model=server.model, messages=server.messages, tools=[tool])


@refused("`chat.completions.parse`", saying="response_format is not supported: there is no structured output.")
def structured(server: Server) -> None:
    from pydantic import BaseModel

    class Colour(BaseModel):
        name: str

    connect(server).chat.completions.parse(model=server.model, messages=server.messages, response_format=Colour)


main()
