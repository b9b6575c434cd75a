"""`Tokenizer`: loading, ids, token bytes and the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from common.errors import ModelError, RequestError
from common.tokenizer import Tokenizer
from tests.kit.tokenizers import (
    BOS,
    EOS,
    EOT,
    LLAMA3_TEMPLATE,
    byte_tokenizer,
    save_byte_tokenizer,
    spm_ids,
    spm_tokenizer,
    wrap,
)

BYTE_TOK = byte_tokenizer()
SPM_TOK = spm_tokenizer()
USER = {"role": "user", "content": "hi"}


def test_byte_tokenizer_ids_are_bytes() -> None:
    assert BYTE_TOK.encode("🙂 中é<eot>") == [240, 159, 153, 130, 32, 228, 184, 173, 195, 169, EOT]
    assert BYTE_TOK.decode([72, EOT, 105, EOS]) == "Hi"
    assert BYTE_TOK.decode([72, EOT, 105], skip_special_tokens=False) == "H<eot>i"
    assert (BYTE_TOK.bos_token_id, BYTE_TOK.eos_token_id, BYTE_TOK.vocab_size) == (BOS, EOS, 259)
    assert BYTE_TOK.special_token_ids == {BOS, EOS, EOT}


def test_spm_tokenizer_pieces_and_bytes() -> None:
    assert SPM_TOK.encode("Hello world é") == spm_ids("▁Hello", "▁world", "▁", 0xC3, 0xA9)
    assert SPM_TOK.decode(spm_ids("▁Hello", "▁world", "▁", "▁x")) == "Hello world  x"
    assert SPM_TOK.vocab_size == 3 + 256 + 9


@given(st.text())
def test_every_text_survives_encoding(text: str) -> None:
    special = any(name in text for name in ("<bos>", "<eos>", "<eot>"))
    assert special or BYTE_TOK.decode(BYTE_TOK.encode(text)) == text


def test_spaces_are_not_cleaned_up() -> None:
    assert BYTE_TOK.decode(list(b"a , b . do n't")) == "a , b . do n't"


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc80", "\ud83d\ude42"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D") as caught:
        BYTE_TOK.encode(text)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        BYTE_TOK.chat_token_ids([{"role": "user", "content": text}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("text", [None, 3, ["a"], b"a"])
def test_other_things_than_strings_are_refused(text: Any) -> None:
    with pytest.raises(RequestError, match="prompt must be a string"):
        BYTE_TOK.encode(text)


# --- token bytes


def test_token_bytes() -> None:
    assert [BYTE_TOK.token_bytes(i) for i in (0, 32, 240, EOT, 259, 10_000)] == [
        b"\0",
        b" ",
        b"\xf0",
        b"<eot>",
        b"",
        b"",
    ]
    assert [SPM_TOK.token_bytes(i) for i in spm_ids("▁Hello", "▁", 0x0A, 0xE4, "中")] == [
        b" Hello",
        b" ",
        b"\n",
        b"\xe4",
        "中".encode(),
    ]
    assert SPM_TOK.token_bytes(1) == b"<s>"
    assert SPM_TOK.token_bytes(SPM_TOK.vocab_size) == b""
    assert BYTE_TOK.token_text(65) == "A"
    assert BYTE_TOK.token_text(240) == "\ufffd"
    assert SPM_TOK.token_text(spm_ids("▁world")[0]) == " world"


def test_added_tokens_outside_the_byte_alphabet() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens(["中文", "start of turn"])
    assert [tokenizer.token_bytes(i) for i in (259, 260)] == ["中文".encode(), b"start of turn"]
    assert tokenizer.decode([259, 260]) == "中文start of turn"


def tokenizer_with(decoder: Any, pieces: list[str]) -> Tokenizer:
    backend = Backend(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        backend.decoder = decoder
    return wrap(backend)


DECODERS = {
    "bytes": BYTE_TOK,
    "sentencepiece": SPM_TOK,
    "metaspace": tokenizer_with(decoders.Metaspace(), ["▁", "▁a", "b", "▁▁", "é", "▁c▁d"]),
    "metaspace never": tokenizer_with(decoders.Metaspace(prepend_scheme="never"), ["▁", "▁a", "b", "▁▁", "é"]),
    "gemma": tokenizer_with(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        ["▁", "▁a", "b", "<0x0A>", "<0x41>", "\ufffd"],
    ),
    "wordpiece": tokenizer_with(decoders.WordPiece(), ["a", "##b", "c", "!", "##é"]),
    "none": tokenizer_with(None, ["a", "b", "é"]),
}


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_token_bytes_joined_are_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = DECODERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1))
    whole = tokenizer.first_token_bytes(ids[0]) + b"".join(tokenizer.token_bytes(i) for i in ids[1:])
    # SentencePiece's decoder makes one U+FFFD of every byte in a run with a broken one, whole characters included.
    assert name == "sentencepiece" or whole.decode(errors="replace") == tokenizer.decode(ids, False)
    assert "\ufffd" in tokenizer.decode(ids, False) or whole.decode() == tokenizer.decode(ids, False)


# --- loading


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, None])
@pytest.mark.parametrize("add_bos", [False, True])
def test_folder_as_hugging_face_writes_it(tmp_path: Path, template: str | None, add_bos: bool) -> None:
    save_byte_tokenizer(tmp_path, chat_template=template, add_bos=add_bos)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hi") == [BOS] * add_bos + [104, 105]
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (BOS, EOS, 259)
    if template:
        assert tokenizer.chat_token_ids([USER]) == BYTE_TOK.chat_token_ids([USER])


def test_template_inside_tokenizer_config(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, chat_template=None, add_bos=True)
    path = tmp_path / "tokenizer_config.json"
    # As older models have it. Whether a BOS is added is for tokenizer.json alone to say, as in transformers 5.
    old = {"chat_template": LLAMA3_TEMPLATE, "tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | old))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_token_ids([USER]) == BYTE_TOK.chat_token_ids([USER])
    assert tokenizer.encode("hi") == [BOS, 104, 105]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("hello") == list(b"hello")


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it needs a tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ModelError, match="No tokenizer in"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["{", "{}", "", "\0"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_broken_files(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.from_folder(tmp_path)


def test_slow_tokenizers_are_refused() -> None:
    with pytest.raises(ModelError, match="object is not a fast tokenizer"):
        Tokenizer(object())
