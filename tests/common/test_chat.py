"""Chat messages: what a template gets to see, what it makes of them, and what is refused with the place and reason."""

import subprocess
import sys
from typing import Any

import pytest

from common.chat import normalize_messages
from common.errors import RequestError
from tests.kit.tokenizers import BOS, EOT, GEMMA_TEMPLATE, byte_tokenizer

BYTE_TOK = byte_tokenizer(add_bos=True)
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yes, "}


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_plain_message_is_left_as_it_is(role: str) -> None:
    assert normalize_messages([{"role": role, "content": "hi"}]) == [{"role": role, "content": "hi"}]


def test_developer_is_rendered_as_system() -> None:
    assert normalize_messages([{"role": "developer", "content": "be brief"}])[0]["role"] == "system"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_tpl_6_text_parts_are_joined_for_every_role(role: str) -> None:
    assert normalize_messages([{"role": role, "content": [text("a"), text("b")]}]) == [
        {"role": role, "content": "a\nb"}
    ]


@pytest.mark.parametrize(("content", "expected"), [(None, ""), ("", ""), ([], ""), ([text("")], ""), (" a ", " a ")])
def test_empty_and_spaced_content(content: Any, expected: str) -> None:
    assert normalize_messages([{"role": "user", "content": content}])[0]["content"] == expected


def test_only_fields_for_templates_are_passed_on() -> None:
    message = {
        "role": "tool",
        "content": "42",
        "name": "sum",
        "tool_call_id": "call_1",
        "tool_calls": [],
        "function_call": None,
        "refusal": None,
        "cache_control": {"type": "ephemeral"},
    }
    before = {**message}
    assert normalize_messages([message]) == [{"role": "tool", "content": "42", "name": "sum", "tool_call_id": "call_1"}]
    assert message == before


def test_tpl_8_empty_messages() -> None:
    with pytest.raises(RequestError, match="at least one message") as caught:
        normalize_messages([])
    assert (caught.value.param, caught.value.code) == ("messages", "empty_array")


@pytest.mark.parametrize("messages", [None, {"role": "user", "content": "hi"}, "hi", 3])
def test_tpl_8_messages_missing_or_no_list(messages: Any) -> None:
    with pytest.raises(RequestError, match="must be a list") as caught:
        normalize_messages(messages)
    assert (caught.value.param, caught.value.code) == ("messages", None)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hi", r"messages\[1\] must be an object"),
        (None, r"messages\[1\] must be an object"),
        ({"content": "hi"}, r"messages\[1\] has the role None: it must be one of system, developer, user"),
        ({"role": "robot", "content": "hi"}, "role 'robot'"),
        ({"role": ["user"], "content": "hi"}, "role"),
        ({"role": "User", "content": "hi"}, "role 'User'"),
        ({"role": "user"}, r"messages\[1\] has no content"),
        ({"role": "user", "content": 3}, r"messages\[1\].content must be a string or a list of parts, got 3"),
        ({"role": "user", "content": {"type": "text"}}, "must be a string or a list"),
        ({"role": "user", "content": ["hi"]}, r"messages\[1\].content\[0\] must be an object"),
        ({"role": "user", "content": [text("a"), {"type": "image_url"}]}, r"content\[1\] has the type 'image_url'"),
        ({"role": "user", "content": [{"text": "a"}]}, "has the type None"),
        ({"role": "user", "content": [text(None)]}, r"content\[0\].text must be a string, got None"),
        ({"role": "user", "content": "hi", "name": 3}, r"messages\[1\].name must be a string"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls, which is not supported"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call, which is not"),
    ],
)
def test_refusal_names_place_and_reason(message: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        normalize_messages([{"role": "user", "content": "hi"}, message])
    assert caught.value.param == "messages"


def test_refusal_of_something_long_stays_short() -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages("x" * 100_000)
    assert len(str(caught.value)) < 300


def test_text_modules_load_neither_torch_nor_transformers() -> None:
    code = "import sys, common.chat, common.detokenizer; print(*{'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


# --- the template


def test_tpl_1_exactly_one_bos() -> None:
    ids = BYTE_TOK.chat_token_ids([USER])
    assert ids == [BOS, *b"[user]\nhi", EOT, *b"[assistant]\n"]
    assert BYTE_TOK.encode("hi") == [BOS, *b"hi"]  # completions: the tokenizer's own


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_tpl_2_base_model_without_template(add_generation_prompt: bool) -> None:
    base = byte_tokenizer(chat_template=None)
    with pytest.raises(RequestError, match="no chat template") as caught:
        base.chat_token_ids([USER], add_generation_prompt)
    assert caught.value.param == "messages"
    assert base.encode("hi") == list(b"hi")


def test_tpl_3_generation_prompt_and_continuation_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        BYTE_TOK.chat_token_ids([USER, ASSISTANT], add_generation_prompt=True, continue_final_message=True)


def test_tpl_3_final_assistant_message_opens_a_new_turn_by_default() -> None:
    assert BYTE_TOK.render_chat([USER, ASSISTANT]) == "<bos>[user]\nhi<eot>[assistant]\nyes,<eot>[assistant]\n"


@pytest.mark.parametrize(("content", "left"), [("yes, ", "yes,"), ("yes", "yes"), ("", ""), (" hi", "hi")])
def test_final_message_is_continued(content: str, left: str) -> None:
    chat = [USER, {"role": "assistant", "content": content}]
    rendered = BYTE_TOK.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered.rstrip() == f"<bos>[user]\nhi<eot>[assistant]\n{left}".rstrip()


def test_only_an_assistant_is_continued() -> None:
    with pytest.raises(RequestError, match="assistant's message at the end, not one of role 'user'") as caught:
        BYTE_TOK.render_chat([USER], add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_template_that_drops_the_final_message_cannot_continue_it() -> None:
    tokenizer = byte_tokenizer(chat_template="{% if false %}content{% endif %}hello")
    with pytest.raises(RequestError, match="final message does not appear in the chat") as caught:
        tokenizer.render_chat([USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True)
    assert "Rendered chat" not in str(caught.value)


def test_tpl_5_template_refuses_a_system_message() -> None:
    with pytest.raises(RequestError, match="System role not supported") as caught:
        byte_tokenizer(chat_template=GEMMA_TEMPLATE).chat_token_ids([{"role": "system", "content": "be brief"}, USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[USER, USER], [ASSISTANT], [USER, ASSISTANT, ASSISTANT]])
def test_tpl_5_template_refuses_the_order_of_roles(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        byte_tokenizer(chat_template=GEMMA_TEMPLATE).chat_token_ids(messages)


@pytest.mark.parametrize(
    "template", ["{{ messages[7]['role'] + 'x' }}", "{% if %}", "{{ 1 + 'x' }}", "{{ nothing() }}"]
)
def test_tpl_5_broken_template_is_no_fault_of_ours(template: str) -> None:
    with pytest.raises(RequestError, match="The model's chat template"):
        byte_tokenizer(chat_template=template).chat_token_ids([USER])


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_tpl_6_parts_make_the_same_prompt_as_a_string(role: str) -> None:
    parts = BYTE_TOK.chat_token_ids([{"role": role, "content": [text("a"), text("b")]}])
    assert parts == BYTE_TOK.chat_token_ids([{"role": role, "content": "a\nb"}])


def test_tpl_8_empty_messages_are_refused_before_the_template() -> None:
    with pytest.raises(RequestError) as caught:
        byte_tokenizer(chat_template=None).chat_token_ids([])
    assert caught.value.code == "empty_array"
