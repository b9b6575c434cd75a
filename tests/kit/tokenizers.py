"""BYTE-TOK and SPM-TOK of the case list: real tokenizers, small enough that a test can write its token ids by hand.

And what shows them at work: `stream` runs a `Detokenizer`, `cut` makes a tokenizer that cuts a text where it should.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from common.detokenizer import Detokenizer
from common.sampling_params import SamplingParams
from common.tokenizer import BYTE_OF_CHAR, Tokenizer

BOS, EOS, EOT = 256, 257, 258  # of BYTE-TOK; every other id is a byte

# Prints the BOS itself and trims what it is given, as Llama 3's does.
LLAMA3_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '[' + message['role'] + ']\n' + message['content'] | trim + '<eot>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)

# Refuses what Gemma's refuses, in its words.
GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{{ '[' + message['role'] + ']\n' + message['content'] | trim + '<eot>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[model]\n' }}{% endif %}"
)

SPM_PIECES = ("▁Hello", "▁world", "▁", "▁x", "Hello", "world", "x", "中", "!")


def byte_tokenizer(*, chat_template: str | None = LLAMA3_TEMPLATE, add_bos: bool = False) -> Tokenizer:
    """BYTE-TOK: ids 0 to 255 are the byte values, `<bos>` = 256, `<eos>` = 257, `<eot>` = 258.

    Args:
        chat_template: `None` for a base model.
        add_bos: whether `encode` puts a `<bos>` before a prompt.
    """
    return Tokenizer(_byte_hf_tokenizer(chat_template, add_bos))


def save_byte_tokenizer(folder: Path, *, chat_template: str | None = LLAMA3_TEMPLATE, add_bos: bool = False) -> None:
    """Write BYTE-TOK as Hugging Face does: tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    _byte_hf_tokenizer(chat_template, add_bos).save_pretrained(folder)


def spm_tokenizer() -> Tokenizer:
    """SPM-TOK: Llama 2's normaliser and decoder over `SPM_PIECES`; anything else is spelled in byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    backend = Backend(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def spm_ids(*pieces: str | int) -> list[int]:
    """SPM-TOK's ids: a piece by its name, a byte token by its number."""
    return [3 + piece if isinstance(piece, int) else 3 + 256 + SPM_PIECES.index(piece) for piece in pieces]


def pieces_tokenizer(pieces: list[bytes]) -> Tokenizer:
    """A byte-level tokenizer with exactly these tokens (id = index; no two alike), to cut a text anywhere."""
    return wrap(_byte_level_backend(pieces))


def wrap(backend: Backend, **hf_arguments: Any) -> Tokenizer:
    """Our tokenizer around a bare `tokenizers.Tokenizer`."""
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **hf_arguments))


def stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    prompt: Sequence[int] = (),
    ends_by_token: bool = False,
    step: int = 1,
    **params: Any,
) -> tuple[list[str], Detokenizer]:
    """The deltas of each `step` tokens, empty ones left out, and the detokenizer after them."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    deltas = []
    for start in range(0, len(token_ids), step):
        is_last = start + step >= len(token_ids)
        deltas.append(detokenizer.append(token_ids[start : start + step], ends_by_token=ends_by_token and is_last))
        if detokenizer.stop_reason is not None:
            break
    deltas.append(detokenizer.finish())
    return [delta for delta in deltas if delta], detokenizer


def cut(text: str, sizes: Sequence[int]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer whose tokens are `text` cut after so many bytes each (the sizes in turn), and the ids of `text`."""
    raw = text.encode()
    pieces: list[bytes] = []
    while raw:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(raw[:size])
        raw = raw[size:]
    vocab = list(dict.fromkeys(pieces)) or [b"a"]
    return pieces_tokenizer(vocab), [vocab.index(piece) for piece in pieces]


def _byte_level_backend(pieces: list[bytes]) -> Backend:
    char_of_byte = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    vocab = {"".join(char_of_byte[byte] for byte in piece): index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_hf_tokenizer(chat_template: str | None, add_bos: bool) -> PreTrainedTokenizerFast:
    backend = _byte_level_backend([bytes([byte]) for byte in range(256)])
    backend.add_special_tokens(["<bos>", "<eos>", "<eot>"])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=chat_template
    )
