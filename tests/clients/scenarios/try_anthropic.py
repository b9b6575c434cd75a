"""Anthropic's own library: it knows no other protocol than its own."""

import anthropic
from scenario import Server, main, refused


@refused("`messages.create`", saying="/v1/messages")
def messages(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    client.messages.create(model=server.model, max_tokens=server.max_tokens, messages=server.messages)


main()
