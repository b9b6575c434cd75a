"""What of a body decides where it goes: its prompt's bytes, in blocks, behind its salt."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v0_10_scale_out.cluster.keys import BLOCK_BYTES, MAX_BLOCKS, chain, content_of, key_of
from v0_10_scale_out.hash_chain import extend, root

SYSTEM = {"role": "system", "content": "You are a patient teacher of arithmetic. " * 10}


def key(**body):
    return key_of(json.dumps(body).encode())


def num_shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize(("num_bytes", "blocks"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2), (640, 10)])
def test_only_full_blocks_count(num_bytes, blocks):
    assert len(key(prompt="x" * num_bytes)) == blocks


def test_a_key_has_a_last_block():
    assert len(key(prompt="x" * (MAX_BLOCKS + 5) * BLOCK_BYTES)) == MAX_BLOCKS


def test_it_is_the_chain_of_the_prefix_cache():
    """With bytes in the place of tokens; `extend` packs each into eight."""
    content = bytes(range(64))
    assert chain(content, "s")[0] != extend(root("s"), list(content)).digest  # packed otherwise
    assert chain(content)[0] != chain(content, "s")[0]


def test_the_same_beginning_has_the_same_blocks_and_no_others():
    a, b = key(prompt="a" * 200 + "b" * 200), key(prompt="a" * 200 + "c" * 200)
    assert num_shared(a, b) == 3  # of 200 bytes, 192 are full blocks
    assert not set(a[3:]) & set(b[3:])


def test_the_same_block_behind_another_past_is_another():
    a, b = key(prompt="a" * 64 + "x" * 64), key(prompt="b" * 64 + "x" * 64)
    assert not set(a) & set(b)


def test_a_salt_is_another_world():
    unsalted, s, t = (key(prompt="x" * 200, **salt) for salt in ({}, {"cache_salt": "s"}, {"cache_salt": "t"}))
    assert not set(unsalted) & set(s)
    assert not set(s) & set(t)
    assert s == key(prompt="x" * 200, cache_salt="s", temperature=0.5, stream=True)


@pytest.mark.parametrize("salt", [None, 5, [], {}])
def test_a_salt_that_is_no_text_is_none(salt):
    """`null` is as if it were not there; the others are refused by the replica."""
    assert key(prompt="x" * 200, cache_salt=salt) == key(prompt="x" * 200)


def test_a_conversation_begins_with_its_last_turns_prompt():
    turn = [SYSTEM, {"role": "user", "content": "What is two and two, and why? " * 5}]
    answer = {"role": "assistant", "content": "Four. " * 40}
    before = key(messages=turn)
    after = key(messages=[*turn, answer, {"role": "user", "content": "And three and three?"}])
    assert before == after[: len(before)]


def test_users_of_one_system_prompt_share_its_blocks():
    a, b = (key(messages=[SYSTEM, {"role": "user", "content": text * 100}]) for text in ("a", "b"))
    assert num_shared(a, b) >= len(json.dumps(SYSTEM)) // BLOCK_BYTES


def test_the_order_of_a_messages_fields_does_not_matter():
    a = key(messages=[{"role": "user", "content": "x" * 200}])
    assert a == key(messages=[{"content": "x" * 200, "role": "user"}])


def test_what_the_template_is_told_stands_in_front():
    messages = [{"role": "user", "content": "x" * 200}]
    assert not set(key(messages=messages)) & set(key(messages=messages, chat_template_kwargs={"enable_thinking": True}))
    assert key(messages=messages) == key(messages=messages, chat_template_kwargs={})


def test_token_ids_are_sixteen_a_block():
    assert len(key(prompt=list(range(47)))) == 2
    assert num_shared(key(prompt=list(range(64))), key(prompt=[*range(32), *range(100, 132)])) == 2


@pytest.mark.parametrize("prompt", ["x" * 200, list(range(64))])
def test_of_several_prompts_the_first_one_counts(prompt):
    assert key(prompt=[prompt, "something else"]) == key(prompt=prompt)


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"5", b"null", b"\xff", b'{"prompt": 5}', b'{"prompt": null}', b'{"prompt": []}'),
        *(b'{"prompt": [true, 1]}', b'{"prompt": [-1]}', b'{"prompt": [1e30]}', b'{"prompt": {}}', b'{"messages": 5}'),
        *(b'{"prompt": [99999999999999999999]}', b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"),
    ],
)
def test_what_is_no_prompt_has_no_key(raw):
    assert key_of(raw) == []


@pytest.mark.parametrize("messages", [[5], [None], [[]], ["x"], [{}], []])
def test_messages_of_any_shape_have_some_key(messages):
    assert isinstance(key(messages=messages * 100), list)


def test_a_lone_surrogate_is_no_fault():
    assert len(key_of(b'{"prompt": "' + rb"\ud800" * 100 + b'"}')) == 4  # three bytes each
    assert key_of(b'{"messages": [{"role": "user", "content": "' + rb"\ud800" * 100 + b'"}]}')


@given(st.binary(max_size=1000), st.binary(max_size=1000))
def test_keys_agree_exactly_as_far_as_whole_blocks_do(a, b):
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert num_shared(chain(a), chain(b)) == same // BLOCK_BYTES


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_any_json_has_a_key_or_none(value):
    assert isinstance(key_of(json.dumps({"prompt": value, "messages": None}).encode()), list)
    assert isinstance(key_of(json.dumps({"messages": value}).encode()), list)
    assert isinstance(content_of({"messages": value, "prompt": value}), bytes)
