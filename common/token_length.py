"""How many tokens a text must have, by its length alone: what is too long for a context is known before it is encoded.

Encoding a text of megabytes takes seconds. The bound holds only where characters do not get lost on their way into
tokens, so that a tokenizer that may drop some has none. Torch-free; changes in no milestone.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

KEEPS_TEXT = {"Prepend", "Lowercase", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


@dataclass(frozen=True, slots=True)
class LengthBound:
    """What a tokenizer's vocabulary says about lengths.

    Attributes:
        longest: the most characters of a text that one token can stand for.
        lost: characters that have no token at all and leave none behind.
    """

    longest: int
    lost: str = ""

    @classmethod
    def of(cls, backend: "tokenizers.Tokenizer", byte_pieces: dict[str, int]) -> "LengthBound | None":
        """The bound of a tokenizer, or `None` where none can be given.

        A piece has at least as many characters as the text that it stands for: byte-level ones have one for each byte,
        SentencePiece's a `▁` for a space and `<0x41>` for a byte.

        Args:
            backend: the tokenizer.
            byte_pieces: how a byte-level vocabulary writes each byte.
        """
        added = backend.get_added_tokens_decoder().values()
        keeps = _keeps_text(backend.normalizer) and _keeps_text(backend.pre_tokenizer)
        if not keeps or any(token.lstrip or token.rstrip for token in added):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        longest = max(map(len, vocabulary), default=1)
        if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            return cls(longest)
        missing = [byte for piece, byte in byte_pieces.items() if piece not in vocabulary]
        # A byte from 0x80 to 0xBF is in every character beyond ASCII: with those, none of these is lost as a whole.
        if len(missing) == 256 or any(0x80 <= byte < 0xC0 for byte in missing):
            return None
        return cls(longest, "".join(chr(byte) for byte in missing if byte < 0x80))

    def fewest_tokens(self, text: str) -> int:
        """No encoding of the text has fewer."""
        num_kept = len(text) - sum(map(text.count, self.lost))
        return -(-num_kept // self.longest)


def _keeps_text(component: Any) -> bool:
    """Whether a normaliser or a pre-tokenizer leaves no character out."""
    return component is None or _step_keeps_text(json.loads(component.__getstate__()))


def _step_keeps_text(state: dict[str, Any]) -> bool:
    if state["type"] == "Sequence":
        return all(map(_step_keeps_text, state.get("normalizers", state.get("pretokenizers", []))))
    if state["type"] == "Replace":
        pattern = state["pattern"].get("String")
        return pattern is not None and len(state["content"]) >= len(pattern)
    return state["type"] in KEEPS_TEXT and state.get("behavior") != "Removed"
