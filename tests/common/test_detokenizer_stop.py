"""`Detokenizer` with stop strings: where the text ends, what is held back, and what is never shown."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.detokenizer import Detokenizer
from common.errors import RequestError
from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer
from tests.kit.tokenizers import EOS, EOT, byte_tokenizer, cut, pieces_tokenizer, spm_ids, spm_tokenizer, stream

BYTE_TOK = byte_tokenizer()
SPM_TOK = spm_tokenizer()


def pieces(*texts: str) -> tuple[Tokenizer, list[int]]:
    """A tokenizer with these tokens, and their ids."""
    return pieces_tokenizer([text.encode() for text in texts]), list(range(len(texts)))


def expected_text(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The rule, character by character: the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_stp_1_no_character_of_a_stop_string_is_sent() -> None:
    tokenizer, ids = pieces("DEF", "G", "HI", "J")
    deltas, detokenizer = stream(tokenizer, ids, stop=["DEFGHIJ"])
    assert deltas == []
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("DEFGHIJ", 4)


def test_stp_1_a_prefix_that_goes_another_way_is_sent_late_but_whole() -> None:
    tokenizer, ids = pieces("DEF", "G", "HI", "K", "D", "E")
    deltas, detokenizer = stream(tokenizer, ids, stop=["DEFGHIJ"])
    assert deltas == ["DEFGHIK", "DE"]
    assert detokenizer.stop_reason is None


def test_stp_2_stop_string_that_ends_inside_a_token() -> None:
    tokenizer, ids = pieces("ABC", "DEF", "G")
    deltas, detokenizer = stream(tokenizer, ids, stop=["DE"])
    assert deltas == ["ABC"]
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("DE", 2)
    assert stream(tokenizer, ids, stop=["CD"])[0] == ["AB"]
    assert stream(tokenizer, ids, stop=["B"])[0] == ["A"]


def test_stp_3_held_text_is_sent_when_the_request_ends_otherwise() -> None:
    ids = [*b"UNO DUE TRE", EOS]
    deltas, detokenizer = stream(BYTE_TOK, ids, stop=["TRE\nAAAAAAAA"], ends_by_token=True)
    assert deltas == [*"UNO DUE ", "TRE"]  # only a real prefix waits
    assert detokenizer.stop_reason is None
    assert "".join(stream(BYTE_TOK, ids[:-1], stop=["TRE\nAAAAAAAA"])[0]) == "UNO DUE TRE"  # by its length


@pytest.mark.parametrize(("include", "expected"), [(True, "abcSTOP"), (False, "abc")])
@pytest.mark.parametrize("step", [1, 3, 99])
def test_stp_5_include_stop_str_in_output(include: bool, expected: str, step: int) -> None:
    deltas, _ = stream(BYTE_TOK, b"abcSTOPxyz", stop=["STOP"], include_stop_str_in_output=include, step=step)
    assert "".join(deltas) == expected
    tokenizer, ids = pieces("abcSTOPxyz")
    assert stream(tokenizer, ids, stop="STOP", include_stop_str_in_output=include)[0] == [expected]


@pytest.mark.parametrize("stop", [None, []])
def test_stp_6_no_stop_strings(stop: object) -> None:
    assert "".join(stream(BYTE_TOK, b"a\nb", stop=stop)[0]) == "a\nb"


def test_stp_6_one_string_is_one_stop_string() -> None:
    deltas, detokenizer = stream(BYTE_TOK, b"END, a\nb", stop="\n")
    assert ("".join(deltas), detokenizer.stop_reason) == ("END, a", "\n")
    assert "".join(stream(BYTE_TOK, b"E N DEND", stop="END")[0]) == "E N D"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_stp_6_empty_stop_string_is_refused(stop: object) -> None:
    with pytest.raises(RequestError, match="empty string"):
        stream(BYTE_TOK, b"a", stop=stop)


def test_stp_6_five_stop_strings() -> None:
    assert "".join(stream(BYTE_TOK, b"one two", stop=["1", "2", "3", "4", "w"])[0]) == "one t"


def test_stp_9_special_tokens_end_by_id_not_by_text() -> None:
    ids = [72, 105, EOT]
    deltas, detokenizer = stream(BYTE_TOK, ids, stop=["<eot>"], ends_by_token=True)
    assert ("".join(deltas), detokenizer.stop_reason) == ("Hi", None)
    _, detokenizer = stream(BYTE_TOK, ids, stop=["<eot>"])  # without an end id its text is "", and cannot match
    assert detokenizer.stop_reason is None
    # Shown special tokens are text like any other.
    deltas, detokenizer = stream(BYTE_TOK, ids, stop=["<eot>"], skip_special_tokens=False)
    assert ("".join(deltas), detokenizer.stop_reason) == ("Hi", "<eot>")


def test_the_match_that_is_complete_first_wins() -> None:
    for step in (1, 2, 99):
        # "abcd" starts first, but "bc" is complete first: whether a "d" comes is not known yet.
        deltas, detokenizer = stream(BYTE_TOK, b"xabcd", stop=["abcd", "bc"], step=step)
        assert ("".join(deltas), detokenizer.stop_reason, detokenizer.num_tokens) == ("xa", "bc", 4)
        deltas, detokenizer = stream(BYTE_TOK, b"xabcd", stop=["c", "abc", "bc"], step=step)
        assert ("".join(deltas), detokenizer.stop_reason, detokenizer.num_tokens) == ("x", "abc", 4)


def test_several_tokens_at_once_tell_which_one_matched() -> None:
    detokenizer = Detokenizer(BYTE_TOK, [], SamplingParams(stop=["END"]))
    assert detokenizer.append(list(b"abE")) == "ab"
    assert detokenizer.append(list(b"NDxyz")) == ""
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("END", 5)
    assert detokenizer.append(list(b"END")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == 5
    ends = Detokenizer(BYTE_TOK, [], SamplingParams(stop=["END"]))  # the stop string comes before the end token
    assert (ends.append([*b"ENDx", EOS], ends_by_token=True), ends.stop_reason, ends.num_tokens) == ("", "END", 3)


def test_stop_string_may_begin_in_no_prompt() -> None:
    deltas, detokenizer = stream(BYTE_TOK, b"ND", prompt=list(b"E"), stop=["END"])
    assert ("".join(deltas), detokenizer.stop_reason) == ("ND", None)


def test_stop_string_of_characters_over_tokens() -> None:
    ids = list("a🙂中b".encode())
    assert "".join(stream(BYTE_TOK, ids, stop=["🙂中"])[0]) == "a"
    assert "".join(stream(BYTE_TOK, ids, stop=["中"])[0]) == "a🙂"
    # A character that shares its first bytes with one of a stop string is no match, nor is half of one.
    assert "".join(stream(BYTE_TOK, list("🙃".encode()), stop=["🙂"])[0]) == "🙃"


def test_stop_string_with_the_space_of_sentencepiece() -> None:
    ids = spm_ids("▁Hello", "▁world", "▁x")
    assert stream(SPM_TOK, ids, stop=[" world"])[0] == ["Hello"]
    assert stream(SPM_TOK, ids, stop=[" Hello"])[0] == ["Hello", " world", " x"]
    assert stream(SPM_TOK, ids, stop=[" Hello"], prompt=spm_ids("!"))[0] == []


@pytest.mark.parametrize(
    ("min_tokens", "expected", "stop_reason"),
    [(0, "ab", "STOP"), (5, "ab", "STOP"), (6, "abSTOPcd", "STOP"), (12, "abSTOPcdSTOP", None)],
)
@pytest.mark.parametrize("step", [1, 4, 99])
def test_len_8_text_of_the_first_min_tokens_does_not_stop(
    min_tokens: int, expected: str, stop_reason: str | None, step: int
) -> None:
    deltas, detokenizer = stream(BYTE_TOK, b"abSTOPcdSTOP", stop=["STOP"], min_tokens=min_tokens, step=step)
    assert ("".join(deltas), detokenizer.stop_reason) == (expected, stop_reason)


def test_len_8_passed_match_inside_held_text_stays_passed() -> None:
    # "bc" was complete within the first three tokens; it is held as the beginning of "abcd", and must not match late.
    for step in (1, 99):
        deltas, detokenizer = stream(BYTE_TOK, b"abcxbc", stop=["abcd", "bc"], min_tokens=3, step=step)
        assert ("".join(deltas), detokenizer.stop_reason) == ("abcx", "bc")
        deltas, detokenizer = stream(BYTE_TOK, b"aaaa", stop=["aa"], min_tokens=2, step=step)
        assert ("".join(deltas), detokenizer.stop_reason) == ("a", "aa")


CHARS = "ab🙂é "


@given(
    text=st.text(CHARS, max_size=30),
    stop=st.lists(st.text(CHARS, min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    step=st.integers(1, 4),
)
@example(text="aab", stop=["ab"], include=False, sizes=[1], step=1)
def test_any_cut_ends_at_the_same_character(
    text: str, stop: list[str], include: bool, sizes: list[int], step: int
) -> None:
    tokenizer, ids = cut(text, sizes)
    deltas, detokenizer = stream(tokenizer, ids, stop=stop, include_stop_str_in_output=include, step=step)
    assert ("".join(deltas), detokenizer.stop_reason) == expected_text(text, stop, include)


@given(
    ids=st.lists(st.integers(0, SPM_TOK.vocab_size - 1)),
    stop=st.lists(st.text("ow x中\ufffd", min_size=1, max_size=3), max_size=3),
    step=st.integers(1, 4),
)
def test_sentencepiece_ends_at_the_same_character(ids: list[int], stop: list[str], step: int) -> None:
    text = "".join(stream(SPM_TOK, ids)[0])
    deltas, detokenizer = stream(SPM_TOK, ids, stop=stop, step=step)
    assert ("".join(deltas), detokenizer.stop_reason) == expected_text(text, stop, False)


@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 8),
)
def test_held_text_is_exactly_what_may_become_a_stop_string(text: str, stop: list[str], min_tokens: int) -> None:
    detokenizer = Detokenizer(BYTE_TOK, [], SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=None))
    shown = ""
    for end in range(1, len(text) + 1):
        shown += detokenizer.append([ord(text[end - 1])])
        matched = [string for string in stop if text[:end].endswith(string)] if end > min_tokens else []
        assert (detokenizer.stop_reason is not None) == bool(matched)
        if matched:
            assert shown == text[: end - max(map(len, matched))]
            return
        held = [n for n in range(end + 1) if any(n < len(s) and s.startswith(text[end - n : end]) for s in stop)]
        assert shown == text[: end - max(held)]
