"""A tokenizer's configuration as JSON, for clients that render chats themselves. Changes in no milestone."""

from typing import Any

OF_THIS_MACHINE = ("vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "name_or_path")


def describe_tokenizer(hf_tokenizer: Any) -> dict[str, Any]:
    """What `tokenizer_config.json` says, the special tokens as texts, and the chat template."""
    given = {name: _plain(value) for name, value in hf_tokenizer.init_kwargs.items() if name not in OF_THIS_MACHINE}
    special = {name: token for name, token in hf_tokenizer.special_tokens_map.items() if isinstance(token, str)}
    own = {"tokenizer_class": type(hf_tokenizer).__name__, "chat_template": hf_tokenizer.chat_template}
    return given | special | {name: value for name, value in own.items() if value is not None}


def _plain(value: Any) -> Any:
    """A value as JSON has it: a token is its text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
