"""A prompt's key: the chain of digests by which `routing.py` finds the replica that has computed its beginning.

    {"messages": [...], "cache_salt": "s"}  ─▶  root("s") ─▶ digest(64 bytes) ─▶ digest(64 bytes) ─▶ ...

The chain is that of `hash_chain.py`, over the prompt's bytes instead of its tokens: the ingress has no tokenizer, and
the same beginning makes the same tokens, except for the last one or two. A salt goes into the root as it does in the
cache: a request without it is not led to where it was used. Torch-free.
"""

import json
from array import array
from typing import Any

from ..hash_chain import digest, root

BLOCK_BYTES = 64  # of text; some 16 tokens
MAX_BLOCKS = 1024  # of a key: two prompts that differ only after 64 KiB count as the same one


def key_of(raw: bytes) -> list[bytes]:
    """The key of a body as it was sent; empty where there is no prompt in it that makes a block.

    What is wrong with a body is not found here: the replica says it.
    """
    try:
        body = json.loads(raw)
        if not isinstance(body, dict):
            return []
        salt = body.get("cache_salt")
        return chain(content_of(body), salt if isinstance(salt, str) else None)
    except (ValueError, RecursionError):
        return []


def content_of(body: dict[str, Any]) -> bytes:
    """The prompt's bytes. Of several prompts it is the first one's: all of them go to the same replica."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        # What the template is told besides stands in front, since it may change the text from its beginning on.
        parts = [_text(body["chat_template_kwargs"])] if body.get("chat_template_kwargs") else []
        return b"".join((*parts, *map(_text, messages)))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list) and all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in prompt):
        return array("i", prompt).tobytes()  # 16 ids a block
    return b""


def chain(content: bytes, salt: str | None = None) -> list[bytes]:
    """A digest for each full block, each made from the one before."""
    digests, last = [], root(salt).digest
    for start in range(0, min(len(content), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        last = digest(last, content[start : start + BLOCK_BYTES])
        digests.append(last)
    return digests


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
