"""langchain-openai: chat models and completions of LangChain."""

import asyncio

import openai
from langchain_openai import ChatOpenAI, OpenAI
from scenario import Server, equal, main, raises, refused, works


def chat_model(server: Server, **more) -> ChatOpenAI:
    options = {"model": server.model, "base_url": server.api, "api_key": "none", "temperature": 0, "max_retries": 0}
    return ChatOpenAI(max_tokens=server.max_tokens, **options | more)


@works("`ChatOpenAI`: invoke, stream, batch, async, usage; exceptions of `openai`", '`base_url`, `api_key="none"`')
def chat(server: Server) -> None:
    model = chat_model(server)
    answer = model.invoke(server.question)
    equal(answer.content, server.chat_text, "text")
    usage = answer.usage_metadata
    equal([usage["input_tokens"], usage["output_tokens"]], server.chat_usage, "usage")
    chunks = list(chat_model(server, stream_usage=True).stream(server.question))
    equal("".join(chunk.content for chunk in chunks), server.chat_text, "streamed text")
    [usage] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    equal([usage["input_tokens"], usage["output_tokens"]], server.chat_usage, "usage of the stream")
    equal([a.content for a in model.batch([server.question] * 3)], [server.chat_text] * 3, "batch")
    equal(asyncio.run(model.ainvoke(server.question)).content, server.chat_text, "async text")
    with raises(openai.NotFoundError, "The model 'gpt-x' does not exist"):
        chat_model(server, model="gpt-x").invoke(server.question)
    with raises(openai.BadRequestError, "temperature must be at least 0"):
        chat_model(server, temperature=3).invoke(server.question)


@works("`OpenAI` (completions): invoke and stream", '`base_url`, `api_key="none"`')
def completions(server: Server) -> None:
    model = OpenAI(
        model=server.model, base_url=server.api, api_key="none", temperature=0, max_tokens=server.max_tokens, n=1
    )
    equal(model.invoke(server.prompt), server.completion_text, "text")
    equal("".join(model.stream(server.prompt)), server.completion_text, "streamed text")


@refused("`bind_tools`", saying="tools is not supported: there are no tools.")
def tools(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
    chat_model(server).bind_tools([tool]).invoke(server.question)


@refused("`with_structured_output`", saying="response_format is not supported: there is no structured output.")
def structured(server: Server) -> None:
    schema = {"title": "Colour", "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    chat_model(server).with_structured_output(schema, method="json_schema").invoke(server.question)


main()
