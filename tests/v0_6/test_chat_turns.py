"""A chat's next turn finds what the turns before have computed, where its text gives the same tokens again.

A client sends the conversation back as text, and the chat template and the tokenizer make tokens of it. The engine has
computed others: the prompt, and the answer as the model has said it. With blocks of one token, `num_cached_tokens` of
the next turn is the number of tokens at which the two are still the same. The tests say where that is all of them, and
where it is not.
"""

import pytest

from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer
from common.weights import resolve
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import EOT, byte_tokenizer
from v0_6_prefix_cache import LLM

USER = {"role": "user", "content": "What do you say? Be brief."}
NEXT = {"role": "user", "content": "And then?"}


@pytest.fixture(scope="module")
def smollm2():
    """The default model's tokenizer, with its chat template; without the model."""
    return Tokenizer.from_folder(resolve(None))


def turns(tokenizer, answer_ids, end=None, chat=(USER,), **params):
    """Two turns of a chat with a model that says these ids, then `end`.

    Returns:
        The first answer's text, the tokens of the first turn that have KV, and how many of them the second turn found.
    """
    chat = list(chat)
    prompt = tokenizer.chat_token_ids(chat)
    script = [*answer_ids, *([] if end is None else [end])]
    model = ScriptModel(script, len(prompt), vocab_size=tokenizer.vocab_size, eos_token_ids=(end,) if end else ())
    llm = LLM(model, tokenizer=tokenizer, block_size=1, num_blocks=400, max_model_len=300)
    sampling = SamplingParams(temperature=0.0, max_tokens=len(script), **params)
    [first] = llm.chat(chat, sampling)
    choice = first.outputs[0]
    computed = [*prompt, *choice.token_ids[:-1]]
    chat += [{"role": "assistant", "content": choice.text}, NEXT]
    [second] = llm.chat(chat, SamplingParams(temperature=0.0, max_tokens=1))
    same = [a == b for a, b in zip(computed, second.prompt_token_ids, strict=False)]
    assert second.num_cached_tokens == (same.index(False) if False in same else len(same))
    return choice.text, computed, second.num_cached_tokens


ANSWERS = [
    "Hello there!",
    "🙂",
    "I like 🙂🎉 and 👩‍👩‍👧, 中文 and naïve café.",
    "It ends with one 🙂",
    " One blank before.",
    "\nA line before.",
    "\tA tab before.",
    "A blank behind. ",
    "Lines behind.\n\n",
    "def f(x):\n    return  x\n\n\tpass",
    "1234567890, don't!",
    "",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_ends_by_its_end_token_is_found_whole_by_the_next_turn(smollm2, answer):
    [end] = smollm2.encode("<|im_end|>")
    text, computed, num_found = turns(smollm2, smollm2.encode(answer), end)
    assert text == answer
    assert num_found == len(computed)


def test_a_third_turn_finds_both_before_it(smollm2):
    [end] = smollm2.encode("<|im_end|>")
    chat = [USER, {"role": "assistant", "content": "I like 🙂."}, {"role": "user", "content": "Why? 🤔"}]
    _, computed, num_found = turns(smollm2, smollm2.encode("It smiles 🙂"), end, chat)
    assert num_found == len(computed)


def test_an_answer_that_ends_by_its_length_at_a_characters_end_is_found_whole(smollm2):
    ids = smollm2.encode(
        "Photosynthesis is how plants turn sunlight into sugar: unbelievably efficient, don't you think?"
    )
    for length in range(1, len(ids) + 1):
        text, computed, num_found = turns(smollm2, ids[:length], ignore_eos=True)
        assert num_found == len(computed), text


def test_an_answer_cut_within_a_character_is_found_up_to_that_character(smollm2):
    ids = smollm2.encode("Look: 🎉")  # the last character, with the blank before it, is three tokens
    assert [smollm2.token_bytes(id_) for id_ in ids] == [b"Look", b":", b" \xf0\x9f", b"\x8e", b"\x89"]
    for cut in (1, 2):
        text, _, num_found = turns(smollm2, ids[:-cut], ignore_eos=True)
        assert text == "Look: "  # a part of a character is no text
        assert num_found == len(smollm2.chat_token_ids([USER])) + 2


@pytest.mark.parametrize(
    "answer", ["  Two blanks before.", "\t\tTabs before.", "\n\nTwo lines before.", " ", "\n", "   "]
)
def test_of_an_answer_that_begins_with_two_blanks_or_is_nothing_else_only_the_prompt_is_found(smollm2, answer):
    """They merge with the line's end that the template writes before them: the prompt's last token is another one."""
    [end] = smollm2.encode("<|im_end|>")
    text, _, num_found = turns(smollm2, smollm2.encode(answer), end)
    assert text == answer
    assert num_found == len(smollm2.chat_token_ids([USER])) - 1


def test_a_stop_string_that_begins_with_a_token_leaves_what_is_before_it_to_be_found(smollm2):
    ids = smollm2.encode("One 🙂 and two. STOP and three")
    text, computed, num_found = turns(smollm2, ids, stop=" STOP")
    assert text == "One 🙂 and two."
    assert num_found == len(smollm2.chat_token_ids([USER])) + len(smollm2.encode(text))
    assert num_found <= len(computed)


def test_a_stop_string_that_begins_within_a_token_costs_the_next_turn_that_token(smollm2):
    ids = smollm2.encode("They were happy together.")
    text, computed, num_found = turns(smollm2, ids, stop="gether")
    assert (text, smollm2.token_text(ids[3])) == ("They were happy to", " together")
    assert num_found == len(smollm2.chat_token_ids([USER])) + 3
    assert num_found == len(computed)  # it was the last one, and has no KV: nothing is lost here


def test_a_stop_string_over_several_tokens_leaves_those_before_it(smollm2):
    ids = smollm2.encode("Yes. User: no")
    text, computed, num_found = turns(smollm2, ids, stop="s. User:")
    assert text == "Ye"
    # "Yes" was one token, and "Ye" is another.
    assert num_found == len(smollm2.chat_token_ids([USER])) < len(computed)


def test_an_answer_in_other_tokens_than_the_tokenizers_own_is_found_up_to_the_first_of_them(smollm2):
    [end] = smollm2.encode("<|im_end|>")
    ids = [*smollm2.encode("I say: "), *smollm2.encode("H"), *smollm2.encode("ello"), *smollm2.encode(" there")]
    text, computed, num_found = turns(smollm2, ids, end)
    assert text == "I say: Hello there"
    assert len(smollm2.chat_token_ids([USER])) + 3 <= num_found < len(computed) - 2


def test_a_special_token_within_an_answer_is_not_in_its_text_and_ends_what_is_found(smollm2):
    [special] = smollm2.encode("<|im_start|>")
    ids = [*smollm2.encode("Yes"), special, *smollm2.encode(" and no")]
    text, computed, num_found = turns(smollm2, ids, ignore_eos=True)
    assert text == "Yes and no"
    assert num_found == len(smollm2.chat_token_ids([USER])) + 1 < len(computed)


def test_a_template_that_trims_answers_loses_those_with_blanks_around_them():
    """As Llama 3's does; the default model's does not."""
    tokenizer = byte_tokenizer()
    for answer, num_lost in ((b"yes", 0), (b"yes ", 1), (b" yes", 4)):
        _, computed, num_found = turns(tokenizer, list(answer), EOT)
        assert num_found == len(computed) - num_lost


@pytest.mark.real_model
def test_a_second_turn_with_the_real_model_computes_only_what_is_new(real):
    llm = LLM(**real.ready, num_blocks=60)
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    chat = [{"role": "user", "content": "Say hello to my cat 🐈, in one sentence."}]
    for _ in range(2):
        [first] = llm.chat(chat, greedy)
        chat += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "Once more? 🙂"}]
        computed = [*first.prompt_token_ids, *first.outputs[0].token_ids[:-1]]
        prompt = llm.tokenizer.chat_token_ids(chat)
        assert prompt[: len(computed)] == computed
        [second] = llm.chat(chat, greedy)
        assert second.num_cached_tokens == len(computed) // 16 * 16
        llm.reset_prefix_cache()
        [again] = llm.chat(chat, greedy)
        assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, second.outputs[0].token_ids)
