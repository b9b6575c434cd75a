"""dspy: programs of language models. It calls them by litellm."""

import dspy
from scenario import Server, equal, main, works


def model(server: Server, **more) -> dspy.LM:
    options = {"api_base": server.api, "api_key": "none", "temperature": 0, "max_tokens": server.max_tokens}
    return dspy.LM(f"openai/{server.model}", cache=False, **options | more)


@works("`LM`: a chat, and its usage", '`"openai/NAME"`, `api_base`')
def chat(server: Server) -> None:
    lm = model(server)
    [text] = lm(messages=server.messages)
    equal(text if isinstance(text, str) else text["text"], server.chat_text, "text")
    usage = lm.history[-1]["usage"]
    equal([usage["prompt_tokens"], usage["completion_tokens"]], server.chat_usage, "usage")


main()
