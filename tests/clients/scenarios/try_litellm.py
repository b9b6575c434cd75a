"""litellm: one interface to many providers. `openai/` stands for any server that speaks OpenAI's protocol."""

import asyncio

import litellm
from scenario import Server, equal, main, raises, refused, works

litellm.telemetry = False


def chat(server: Server, **more) -> dict:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.api,
        "api_key": "none",
        "messages": server.messages,
        "temperature": 0,
        "max_tokens": server.max_tokens,
    } | more


@works("`completion`: whole, streamed, async, usage; its own exceptions", '`model="openai/NAME"`, `api_base`')
def completion(server: Server) -> None:
    answer = litellm.completion(**chat(server))
    equal(answer.choices[0].message.content, server.chat_text, "text")
    equal([answer.usage.prompt_tokens, answer.usage.completion_tokens], server.chat_usage, "usage")
    chunks = list(litellm.completion(**chat(server, stream=True, stream_options={"include_usage": True})))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    equal("".join(texts), server.chat_text, "streamed text")
    usage = chunks[-1].usage
    equal([usage.prompt_tokens, usage.completion_tokens], server.chat_usage, "usage of the stream")
    answer = asyncio.run(litellm.acompletion(**chat(server)))
    equal(answer.choices[0].message.content, server.chat_text, "async text")
    with raises(litellm.NotFoundError, "The model 'gpt-x' does not exist"):
        litellm.completion(**chat(server, model="openai/gpt-x"))
    with raises(litellm.BadRequestError, "temperature must be at least 0"):
        litellm.completion(**chat(server, temperature=3))


@works("`completion` by its provider for vLLM", '`model="hosted_vllm/NAME"`, `api_base`')
def hosted_vllm(server: Server) -> None:
    answer = litellm.completion(**chat(server, model=f"hosted_vllm/{server.model}"))
    equal(answer.choices[0].message.content, server.chat_text, "text")


@works("`text_completion`", '`model="text-completion-openai/NAME"`, `api_base`')
def text_completion(server: Server) -> None:
    body = chat(server, model=f"text-completion-openai/{server.model}", prompt=server.prompt)
    del body["messages"]
    equal(litellm.text_completion(**body).choices[0].text, server.completion_text, "text")
    chunks = list(litellm.text_completion(stream=True, **body))
    equal("".join(chunk.choices[0].text or "" for chunk in chunks), server.completion_text, "streamed text")


def respond(server: Server, model: str):
    body = chat(server, model=model, input=server.question, max_output_tokens=server.max_tokens)
    del body["messages"], body["max_tokens"]
    return litellm.responses(**body)


@refused("`responses` with `openai/NAME`", saying="/v1/responses")
def responses(server: Server) -> None:
    respond(server, f"openai/{server.model}")


@works("`responses`", '`model="openai/chat_completions/NAME"`')
def responses_by_chat(server: Server) -> None:
    answer = respond(server, f"openai/chat_completions/{server.model}")
    equal(answer.output[0].content[0].text, server.chat_text, "text")


main()
