"""`Detokenizer`: whole characters, end tokens, and the same text however it is cut into tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.tokenizers import BOS, EOS, EOT, byte_tokenizer, cut, spm_ids, spm_tokenizer, stream

BYTE_TOK = byte_tokenizer()
SPM_TOK = spm_tokenizer()


# --- DET: characters


def test_det_1_split_emoji_is_held_back() -> None:
    ids = [240, 159, 153, 130, 32, 228, 184, 173, 195, 169, 257]
    deltas, _ = stream(BYTE_TOK, ids, ends_by_token=True)
    assert deltas == ["🙂", " ", "中", "é"]
    assert stream(BYTE_TOK, ids, ends_by_token=True, step=99)[0] == ["🙂 中é"]


@pytest.mark.parametrize("step", [1, 2, 99])
def test_det_1_unfinished_character_at_the_end_is_dropped(step: int) -> None:
    for end in ([], [EOS]):
        deltas, _ = stream(BYTE_TOK, [97, 228, 184, *end], ends_by_token=bool(end), step=step)
        assert "".join(deltas) == "a"


def test_det_1_written_replacement_character_is_shown_at_once() -> None:
    assert stream(BYTE_TOK, [97, *"\ufffd".encode(), 98])[0] == ["a", "\ufffd", "b"]
    assert stream(BYTE_TOK, list("a\ufffd".encode()))[0] == ["a", "\ufffd"]


def test_det_1_broken_bytes_are_shown_as_soon_as_they_are_known_to_be() -> None:
    assert stream(BYTE_TOK, [255, 255, 97])[0] == ["\ufffd", "\ufffd", "a"]
    assert stream(BYTE_TOK, [228, 184, 97])[0] == ["\ufffda"]


def test_det_1_broken_byte_fallback_does_not_undo_what_was_shown() -> None:
    ids = spm_ids(0xE4, 0xB8, 0xAD, 0xFF, "▁Hello")
    assert SPM_TOK.decode(ids) == "\ufffd" * 4 + " Hello"  # the library's own whole text contradicts its beginning
    assert stream(SPM_TOK, ids)[0] == ["中", "\ufffd", " Hello"]


@pytest.mark.parametrize(
    ("prompt", "ids", "expected"),
    [
        ([72, 240, 159], [153, 130, 33], "🙂!"),  # the character is the output's, and nothing else of the prompt
        ([72, 240, 159], [33], "!"),  # the prompt's broken character is not
        ([72, 240, 159], [255], "\ufffd"),
        ([240, 159, 153], [130], "🙂"),
        ([240, BOS, 159, 153], [EOT, 130], "🙂"),  # skipped tokens are no part of the text
        ([65, *"\ufffd".encode()], [72], "H"),
        ([255, 255], [72], "H"),
        ([0xBF, 0xBF, 0xBF, 0xBF], [0xBF], "\ufffd"),
        ([], [72], "H"),
        ([BOS, BOS], [72], "H"),
    ],
)
def test_det_1_prompt_is_context(prompt: list[int], ids: list[int], expected: str) -> None:
    assert "".join(stream(BYTE_TOK, ids, prompt=prompt)[0]) == expected


def test_det_3_sentencepiece_spaces_survive() -> None:
    ids = spm_ids("▁Hello", "▁world", "▁", "▁x")
    for prompt in ([], [1]):  # a skipped <s> is no text: the answer starts the text, and its first space goes
        deltas, _ = stream(SPM_TOK, ids, prompt=prompt)
        assert deltas == ["Hello", " world", " ", " x"]
        assert "".join(deltas) == SPM_TOK.decode(ids)
    for prompt in (spm_ids("▁x"), spm_ids("▁"), [1, *spm_ids("!")], spm_ids(0xFF)):
        deltas, _ = stream(SPM_TOK, ids, prompt=prompt)
        assert deltas == [" Hello", " world", " ", " x"]
    assert stream(SPM_TOK, ids, prompt=[1], skip_special_tokens=False)[0][0] == " Hello"
    assert stream(SPM_TOK, spm_ids("▁", "▁x"))[0] == [" x"]
    assert stream(SPM_TOK, spm_ids(0x20, "x"))[0] == ["x"]


@given(
    prompt=st.lists(st.integers(0, SPM_TOK.vocab_size - 1), max_size=4),
    output=st.lists(st.integers(0, SPM_TOK.vocab_size - 1)),
    skip=st.booleans(),
)
def test_det_3_is_the_whole_decoded_less_the_prompt(prompt: list[int], output: list[int], skip: bool) -> None:
    before = SPM_TOK.decode(prompt, skip)
    whole = SPM_TOK.decode(prompt + output, skip)
    shown = "".join(stream(SPM_TOK, output, prompt=prompt, skip_special_tokens=skip)[0])
    assert "\ufffd" in before + whole or shown == whole[len(before) :]
    for step in (2, 3, 99):
        assert "".join(stream(SPM_TOK, output, prompt=prompt, skip_special_tokens=skip, step=step)[0]) == shown


@given(prompt=st.binary(max_size=5), output=st.binary())
def test_det_1_bytes_of_any_kind_are_decoded_like_the_whole(prompt: bytes, output: bytes) -> None:
    shown = "".join(stream(BYTE_TOK, list(output))[0])
    whole = BYTE_TOK.decode(list(output))
    # Less an unfinished character at the end. Python also waits for a third byte after a surrogate's two, as in ED A0.
    assert whole in (shown, shown + "\ufffd") or (output[-2:-1] == b"\xed" and whole == shown + "\ufffd\ufffd")
    assert "".join(stream(BYTE_TOK, list(output), step=99)[0]) == shown
    stream(BYTE_TOK, list(output), prompt=list(prompt))


@given(text=st.text(min_size=1), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_det_1_any_cut_of_any_text(text: str, sizes: list[int]) -> None:
    tokenizer, ids = cut(text, sizes)
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == text
    assert "\ufffd" in text or "\ufffd" not in "".join(deltas)


def test_det_5_end_token_stays_out_of_the_text() -> None:
    ids = [72, 105, 46, 258]
    for skip in (True, False):
        assert stream(BYTE_TOK, ids, ends_by_token=True, skip_special_tokens=skip)[0] == ["H", "i", "."]


def test_det_5_special_tokens_inside_the_text_are_shown_on_request() -> None:
    ids = [72, EOT, 105, BOS, EOT]
    assert stream(BYTE_TOK, ids, ends_by_token=True)[0] == ["H", "i"]
    assert stream(BYTE_TOK, ids, ends_by_token=True, skip_special_tokens=False)[0] == ["H", "<eot>", "i", "<bos>"]
    flags = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert stream(BYTE_TOK, [72, EOT], ends_by_token=True, **flags)[0] == ["H", "<eot>"]


# --- EOS


@pytest.mark.parametrize("end", [EOS, EOT, 33])
def test_eos_1_no_end_token_shows_whichever_it_is(end: int) -> None:
    _, detokenizer = stream(BYTE_TOK, [72, 105, end], ends_by_token=True)
    assert "".join(stream(BYTE_TOK, [72, 105, end], ends_by_token=True)[0]) == "Hi"
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == (None, 3)
    included = stream(BYTE_TOK, [72, 105, end], ends_by_token=True, include_stop_str_in_output=True)[0]
    assert "".join(included) == ("Hi!" if end == 33 else "Hi")  # special ones need skip_special_tokens=False, too


def test_same_id_before_the_end_is_text() -> None:
    assert "".join(stream(BYTE_TOK, [33, 72, 33], ends_by_token=True, step=3)[0]) == "!H"


# --- tokens that the tokenizer lacks


def test_padded_rows_have_no_text() -> None:
    assert stream(BYTE_TOK, [72, 300, 240, 5000, 159, 153, 130])[0] == ["H", "🙂"]


def test_long_prompt_costs_no_more_than_its_end() -> None:
    class Counted(list):  # type: ignore[type-arg]
        looked_at = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.looked_at += 1
            return super().__getitem__(index)

        def __reversed__(self) -> Any:
            return (self[index] for index in range(len(self) - 1, -1, -1))

    assert "".join(stream(BYTE_TOK, [130], prompt=Counted([97] * 100_000 + [240, 159, 153]))[0]) == "🙂"
    assert Counted.looked_at < 10
