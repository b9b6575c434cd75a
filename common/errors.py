"""The two ways in which the *caller* can be wrong, each told in one sentence.

Both are `ValueError`s, so that library users need to know nothing of them; the command lines catch them to print the
sentence without a traceback, and the server (v0.4) turns a `RequestError` into HTTP 400 with OpenAI's error object.
Everything else that is raised is a fault of ours and keeps its traceback.
"""

import reprlib

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 80, 80


def shown(value: object) -> str:
    """What the caller gave, for a message: its `repr`, but never long, and never too deep to be written."""
    return _REPR.repr(value)


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
