"""pydantic-ai: agents with typed answers."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from scenario import Server, equal, main, raises, refused, works


def agent(server: Server, name: str | None = None, **more) -> Agent:
    model = OpenAIChatModel(name or server.model, provider=OpenAIProvider(base_url=server.api, api_key="none"))
    return Agent(model, model_settings=ModelSettings(temperature=0, max_tokens=server.max_tokens), retries=0, **more)


@works("an agent: run and streamed, usage; its own exceptions", "`OpenAIChatModel` with `OpenAIProvider(base_url=...)`")
def text(server: Server) -> None:
    found = agent(server).run_sync(server.question)
    equal(found.output, server.chat_text, "text")
    usage = found.usage() if callable(found.usage) else found.usage
    equal([usage.input_tokens, usage.output_tokens], server.chat_usage, "usage")
    equal(asyncio.run(streamed(server)), server.chat_text, "streamed text")
    with raises(ModelHTTPError, "The model 'gpt-x' does not exist"):
        agent(server, "gpt-x").run_sync(server.question)


async def streamed(server: Server) -> str:
    async with agent(server).run_stream(server.question) as run:
        return "".join([part async for part in run.stream_text(delta=True)])


@refused("an agent with an `output_type`", saying="there are no tools.")
def structured(server: Server) -> None:
    class Colour(BaseModel):
        name: str

    agent(server, output_type=Colour).run_sync(server.question)


main()
