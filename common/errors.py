"""The two ways in which the *caller* can be wrong, each told in one sentence.

Both are `ValueError`s, so that library users need to know nothing of them; the command lines catch them to print the
sentence without a traceback, and the server (v0.4) turns a `RequestError` into HTTP 400 with OpenAI's error object.
Everything else that is raised is a fault of ours and keeps its traceback.
"""

import math
import reprlib

MAX_SHOWN = 120  # characters of a value in a message: a line


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write more than 4,300 digits; 80 of them fit into a line."""
        if x.bit_length() <= 265:
            return repr(x)
        return f"<an integer of about {math.log10(abs(x)):,.0f} digits>"


_SHORT = _Short()


def shown(value: object) -> str:
    """What the caller gave, for a message: its `repr`, but at most a line of it, and never too deep to be written."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


class ModelError(ValueError):
    """The model cannot be loaded: the message says why, and what to do next."""


class RequestError(ValueError):
    """One request cannot be served as it was asked; nothing was changed by asking.

    Args:
        message: one sentence in the caller's words, with the true numbers.
        param: the parameter at fault, as OpenAI's error object names it; `None` where no single one is.
        code: OpenAI's machine-readable code (`context_length_exceeded`, ...), where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
