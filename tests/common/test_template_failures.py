"""A chat template is somebody's program: however it fails, the caller hears how, in a line."""

import pytest

from common.errors import RequestError
from tests.kit.tokenizers import byte_tokenizer

USER = [{"role": "user", "content": "hi"}]
ITSELF = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"


def refusal(template: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        byte_tokenizer(chat_template=template).render_chat(USER)
    return caught.value


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1/0 }}", "(ZeroDivisionError): division by zero"),
        ("{{ '{5}'.format(1) }}", "(IndexError): tuple index out of range"),
        ("{{ '{a}'.format(b=1) }}", "(KeyError): 'a'"),
        (ITSELF, "(RecursionError): maximum recursion depth exceeded"),
        ("{% for i in range(100001) %}{% endfor %}", "(OverflowError): Range too big"),
        ("{{ 'abc'|truncate(1) }}", "(AssertionError): expected length >= 3, got 1"),
        ("{{ cycler() }}", "(RuntimeError): at least one item has to be provided"),
        ("{{ 'a' * 10**18 }}", "(MemoryError): it does not say why"),
        ("{{ 'x'.encode('no such') }}", "(LookupError): unknown encoding: no such"),
        ("{{ messages[7].content }}", "list object has no element 7"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('a\\nb\\nc') }}", "does not accept these messages: a b c"),
    ],
)
def test_unt_23_a_template_that_fails_is_the_callers_error_and_says_how(template: str, words: str) -> None:
    error = refusal(template)
    assert error.param == "messages"
    assert str(error).startswith("The model's chat template")
    assert words in str(error)
    assert "\n" not in str(error)


def test_unt_23_what_a_template_says_is_cut_to_a_line() -> None:
    assert len(str(refusal("{{ raise_exception('x' * 5000) }}"))) < 300


def test_unt_23_a_template_that_failed_once_can_be_rendered_again() -> None:
    tokenizer = byte_tokenizer(chat_template="{% if messages|length > 1 %}{{ 1/0 }}{% endif %}ok")
    with pytest.raises(RequestError):
        tokenizer.render_chat(USER * 2)
    assert tokenizer.render_chat(USER) == "ok"
