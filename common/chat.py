"""OpenAI's chat messages, checked and brought into the one form that every chat template understands.

Templates are written for `{"role": ..., "content": <string>}`; clients send more forms than that. What a template would
turn into a silently different prompt is refused here, by name. Rendering is `tokenizer.py`'s work. Free of torch and of
transformers, so that a server can refuse a request before it touches the engine. Changes in no milestone.
"""

from collections.abc import Mapping
from typing import Any

from common.errors import RequestError, shown

# What each role is called in a template. OpenAI renamed `system` to `developer`; templates know only the old name.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
PASSED_ON = ("name", "tool_call_id")  # besides role and content: what a template may read
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its text's field
NOT_SUPPORTED = ("tool_calls", "function_call")  # would change the prompt; null or empty ones say nothing


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """New message objects with `role` and a string `content`, ready for a chat template; the input is left alone.

    `developer` becomes `system`, a `content` of null becomes `""`, text parts are joined by a newline (as in vLLM).
    The words in which an assistant has refused are its turn's text, too.

    Raises:
        RequestError: with `param="messages"`; an empty list has `code="empty_array"`, as at OpenAI.
    """
    if not isinstance(messages, list | tuple):
        raise _refusal(f"messages must be a list of objects with role and content, got {shown(messages)}.")
    if not messages:
        raise _refusal("messages is empty: a chat needs at least one message.", code="empty_array")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refusal(f"{where} must be an object with role and content, got {shown(message)}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refusal(f"{where} has the role {shown(role)}: it must be one of {', '.join(ROLES)}.")
    for name in NOT_SUPPORTED:
        if message.get(name):
            raise _refusal(f"{where} has {name}, which is not supported.")
    content = message.get("content")
    if role == "assistant" and content in (None, "") and message.get("refusal") is not None:
        content = [{"type": "refusal", "refusal": message["refusal"]}]  # as OpenAI answers, without any parts
    elif "content" not in message:
        raise _refusal(f"{where} has no content.")
    result: dict[str, Any] = {"role": ROLES[role], "content": _text(where, content)}
    for name in PASSED_ON:
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise _refusal(f"{where}.{name} must be a string, got {shown(value)}.")
            result[name] = value
    return result


def _text(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _refusal(f"{where}.content must be a string or a list of parts, got {shown(content)}.")
    return "\n".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise _refusal(f"{where} must be an object with type and text, got {shown(part)}.")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in PARTS:
        raise _refusal(f"{where} has the type {shown(kind)}: only text is supported.")
    text = part.get(PARTS[kind])
    if not isinstance(text, str):
        raise _refusal(f"{where}.{PARTS[kind]} must be a string, got {shown(text)}.")
    return text


def _refusal(message: str, code: str | None = None) -> RequestError:
    return RequestError(message, param="messages", code=code)
