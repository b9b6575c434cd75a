"""The fewest tokens that a text can have, by its length."""

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from common.token_length import LengthBound
from common.tokenizer import BYTE_OF_CHAR
from tests.kit.tokenizers import byte_tokenizer, pieces_tokenizer, spm_tokenizer


@pytest.mark.parametrize("make", [byte_tokenizer, spm_tokenizer])
def test_no_text_has_fewer_tokens_than_the_bound_says(make):
    tokenizer = make()
    rng = random.Random(0)
    texts = ["", "<bos><eos>" * 9, "Hello world" * 20, " " * 50]
    texts += ["".join(rng.choices("Helo wrd中é\U0001f600\n\x04<eot>", k=rng.randrange(80))) for _ in range(200)]
    for text in texts:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.length_bound.fewest_tokens(text) <= num_tokens


def test_the_bound_divides_by_the_longest_piece_and_leaves_out_characters_that_have_no_token():
    pieces = [bytes([byte]) for byte in range(256) if byte not in (4, 0xF1)] + [b"a" * 8]
    tokenizer = pieces_tokenizer(pieces)
    assert tokenizer.length_bound == LengthBound(8, "\x04")
    assert tokenizer.encode("\x04" * 100) == []
    assert [tokenizer.length_bound.fewest_tokens(text) for text in ("", "a", "a" * 9, "a\x04" * 8)] == [0, 1, 2, 1]


def test_a_tokenizer_that_may_drop_text_has_no_bound():
    letters = Backend(models.BPE({"a": 0, "b": 1}, []))  # drops every other character
    assert LengthBound.of(letters, BYTE_OF_CHAR) is None
    for name, component in (
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.Sequence([normalizers.Replace("aa", "a")])),
        ("normalizer", normalizers.NFC()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
    ):
        backend = byte_tokenizer().backend
        assert LengthBound.of(backend, BYTE_OF_CHAR) is not None
        setattr(backend, name, component)
        assert LengthBound.of(backend, BYTE_OF_CHAR) is None
