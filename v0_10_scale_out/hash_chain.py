"""Names for what full blocks hold: a hash of a block's tokens and, through its parent, of all tokens before them.

    tokens          0 .. 15          16 .. 31          32 .. 47        blocks of 16
    root ◀────────── a ◀────────────── b ◀────────────── c             a link points to its parent
    digests          SHA-256(root, 0 .. 15)
                                     SHA-256(a, 16 .. 31)
                                                       SHA-256(b, 32 .. 47)

Keys and values depend on everything before them: attention has mixed it in. So the same sixteen tokens behind another
past are another block, and a digest, which holds its parent's, stands for the whole prefix. A salt goes into the root:
who does not know it finds nothing that was computed under it. Torch-free.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One full block's tokens, and the link before it; the root has no parent, and no tokens of the text."""

    digest: bytes
    token_ids: tuple[int, ...]
    parent: "Link | None" = None

    def equals(self, other: "Link") -> bool:
        """Whether the prefixes that end here are the same, token by token, whatever their digests say.

        Links that were found in the cache are shared, so that the walk ends where the two chains become one: at once,
        as a rule.
        """
        a: Link | None = self
        b: Link | None = other
        while a is not b:
            if a is None or b is None or a.token_ids != b.token_ids:
                return False
            a, b = a.parent, b.parent
        return True


def root(salt: str | None) -> Link:
    """Where a chain begins: every request with the same salt begins at the same place."""
    salted = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return Link(digest(b"", salted), tuple(salted))


def extend(parent: Link, token_ids: Sequence[int]) -> Link:
    """The link of the next full block."""
    return Link(digest(parent.digest, array("q", token_ids).tobytes()), tuple(token_ids), parent)


def digest(parent: bytes, content: bytes) -> bytes:
    """SHA-256: nobody can make up a prompt whose blocks are found under another's name, as one can for `hash()`."""
    return hashlib.sha256(parent + content).digest()
