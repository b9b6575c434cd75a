"""The tokenizer of a `.gguf` file, as the `tokenizer.json` and `tokenizer_config.json` of a Hugging Face folder.

A GGUF file holds the vocabulary, the merges or the scores, and one word for how text is split before merging: the
splitting itself is code in llama.cpp. So only those kinds are read whose splitting is spelled out here, byte-level BPE
(GPT-2's, SmolLM's, Llama 3's) and SentencePiece's BPE (Llama 2's). Any other is refused, because a near miss gives
wrong text and no error. Left out: Unigram, WordPiece and every other vocabulary that no Llama has. Changes in no
milestone.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import ModelError

# `tokenizer.ggml.token_type` of each token (llama.cpp's `llama_token_type`).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

LLAMA3_PRE = ("llama-bpe", "llama3", "llama-v3")  # one splitting under three names, as in llama.cpp
LLAMA3_SPLIT = (  # from the tokenizer.json of meta-llama/Meta-Llama-3-8B
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Tokens that end a turn or a text in models of many makers: many files have one of them and no key that names it.
# (The names by which llama.cpp finds them; those of models that are no Llamas are left out.)
END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
    *("<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<｜end▁of▁sentence｜>"),
)


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build what becomes `tokenizer.json` from the file's metadata; token ids are the file's own.

    Raises:
        ModelError: the kind of tokenizer or of splitting is not known here, or the vocabulary contradicts itself.
    """
    kind = metadata["tokenizer.ggml.model"]
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"its tokenizer (tokenizer.ggml.model) is {kind!r}, and only 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece) can be converted: use the model's Hugging Face folder."
        )
    tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    tokenizer.add_tokens(_added_tokens(metadata))
    template = _post_processor(metadata)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: the special tokens by their roles, and the chat template."""
    tokens, types = metadata["tokenizer.ggml.tokens"], _token_types(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = special_token_id(metadata, key)
        # A file without an unknown or padding token may say 0 for it, which is an ordinary token ("!" in GPT-2's
        # vocabulary): to name it here would make it special, and vanish from decoded text.
        if token_id is not None and (role in ("bos", "eos") or types[token_id] != NORMAL):
            config[f"{role}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def special_token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of `tokenizer.ggml.<name>_token_id`, or `None` where the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id, num_tokens = metadata.get(key), len(metadata["tokenizer.ggml.tokens"])
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ModelError(f"{key} is {token_id}, but its vocabulary has {num_tokens} tokens: download it again.")
    return token_id


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every token that ends a turn or a text, by its key or by its name; the file's `eos_token_id` is the first."""
    by_key = [special_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    by_name = [token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token in END_TOKENS]
    return [token_id for token_id in dict.fromkeys([*by_key, *by_name]) if token_id is not None]


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE: text is split into words, and their bytes are merged in the order of the file's merges."""
    pre = metadata["tokenizer.ggml.pre"]
    splitting: pre_tokenizers.PreTokenizer
    if pre in LLAMA3_PRE:
        splitting = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre == "smollm":
        splitting = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre in ("gpt-2", "default"):
        splitting = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        raise ModelError(
            f"its pre-tokenizer (tokenizer.ggml.pre) is {pre!r}, and only 'smollm', 'gpt-2', 'default' and "
            f"{', '.join(map(repr, LLAMA3_PRE))} can be converted: use the model's Hugging Face folder."
        )
    # The byte alphabet has no space in it, so the only one parts the halves.
    halves = [merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"]]
    merges = [(left, right) for left, _, right in halves]
    # Llama 3 takes a word that is a token as it is, even where its merges would not lead there.
    tokenizer = _bpe(_vocabulary(metadata), merges, ignore_merges=pre in LLAMA3_PRE)
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE: the whole text is one word with `▁` for a space; unknown characters become bytes."""
    unknown = special_token_id(metadata, "unknown")
    tokenizer = _bpe(
        _vocabulary(metadata),
        _merges_by_score(metadata),
        unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    replace, restore = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        tokenizer.decoder = decoders.Sequence(
            [restore, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.normalizer = replace
        tokenizer.decoder = decoders.Sequence([restore, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges_by_score(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best: every split of every token, best token first.

    Control and byte tokens are no pieces to SentencePiece, so no merge makes or uses them. Splits of the same token
    have the same score; the longer left half goes first, as in transformers' `generate_merges`.
    """
    tokens, scores, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], _token_types(metadata)
    if len(scores) != len(tokens):
        raise ModelError(f"it has {len(scores)} token scores for {len(tokens)} tokens: download it again.")
    pieces = {token: scores[i] for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    merges = []
    for piece in sorted(pieces, key=pieces.__getitem__, reverse=True):
        splits = [(piece[:cut], piece[cut:]) for cut in range(len(piece) - 1, 0, -1)]
        merges += [(left, right) for left, right in splits if left in pieces and right in pieces]
    return merges


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the Rust side has no narrower class
        raise ModelError(f"its tokenizer contradicts itself ({error}): download it again.") from None


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise ModelError(f"its vocabulary has the token {twice!r} twice, so that one id could not be decoded.")
    return vocabulary


def _token_types(metadata: Mapping[str, Any]) -> list[int]:
    """The type of each token; a file without types has only normal ones."""
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise ModelError(f"it has {len(types)} token types for {num_tokens} tokens: download it again.")
    return types


def _added_tokens(metadata: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens that are found whole in the text before it is split: control tokens, and those of the model's maker.

    Control tokens are special, which leaves them out of decoded text. So are the tokens that end or begin a text,
    whatever their type says: transformers makes them so when it reads `tokenizer_config.json`, and llama.cpp by name.
    """
    config = tokenizer_config(metadata)
    roles = {config[role] for role in ("bos_token", "eos_token", "unk_token", "pad_token") if role in config}
    roles |= {metadata["tokenizer.ggml.tokens"][token_id] for token_id in end_token_ids(metadata)}
    return [
        AddedToken(token, normalized=False, special=token_type == CONTROL or token in roles)
        for token, token_type in zip(metadata["tokenizer.ggml.tokens"], _token_types(metadata), strict=True)
        if token_type in (CONTROL, USER_DEFINED) or token in roles
    ]


def _post_processor(metadata: Mapping[str, Any]) -> processors.TemplateProcessing | None:
    """Put BOS before and EOS after a text where the file says so, and BOS where llama.cpp does so unasked."""
    bos_by_default = metadata["tokenizer.ggml.model"] == "llama" or metadata["tokenizer.ggml.pre"] in LLAMA3_PRE
    used = {}
    for name, default in (("bos", bos_by_default), ("eos", False)):
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            used[name] = metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{name}_token_id"]]
    if not used:
        return None
    begin, end = [used["bos"]] if "bos" in used else [], [used["eos"]] if "eos" in used else []
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *(f"{token}:1" for token in begin), "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=[(token, metadata[f"tokenizer.ggml.{name}_token_id"]) for name, token in used.items()],
    )
