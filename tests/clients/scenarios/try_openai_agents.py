"""openai-agents: asks for the Responses API unless it is told otherwise."""

import asyncio

import agents
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from scenario import Server, equal, main, refused, works

agents.set_tracing_disabled(True)  # it would send traces to OpenAI


def agent(server: Server, api: str) -> agents.Agent:
    client = AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0)
    agents.set_default_openai_client(client, use_for_tracing=False)
    agents.set_default_openai_api(api)
    settings = agents.ModelSettings(temperature=0, max_tokens=server.max_tokens)
    return agents.Agent(name="agent", model=server.model, model_settings=settings)


@refused("an agent by its defaults", saying="/v1/responses")
def responses(server: Server) -> None:
    agents.Runner.run_sync(agent(server, "responses"), server.question)


@works("an agent: run and streamed", '`set_default_openai_api("chat_completions")`')
def chat_completions(server: Server) -> None:
    found = agents.Runner.run_sync(agent(server, "chat_completions"), server.question)
    equal(found.final_output, server.chat_text, "text")
    equal("".join(asyncio.run(streamed(server))), server.chat_text, "streamed text")


async def streamed(server: Server) -> list[str]:
    run = agents.Runner.run_streamed(agent(server, "chat_completions"), server.question)
    events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    return [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]


@refused("an agent with tools", saying="tools is not supported: there are no tools.")
def tools(server: Server) -> None:
    def now() -> str:
        """The time."""
        return "noon"

    with_tool = agent(server, "chat_completions").clone(tools=[agents.function_tool(now)])
    agents.Runner.run_sync(with_tool, server.question)


main()
