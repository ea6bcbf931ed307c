"""The errors that specdec raises on purpose, each a single line that says what to do."""

from __future__ import annotations


class SpecdecError(Exception):
    """Anything that specdec reports to its caller on purpose."""


class ModelError(SpecdecError):
    """A model cannot be found, read or run.

    The message is one line and names the fix; the command line prints it and exits with status 1.
    """

    def __init__(self, message: str) -> None:
        # Messages quote other libraries, whose own errors may span lines.
        super().__init__(" ".join(message.split()))


class InvalidRequestError(SpecdecError, ValueError):
    """A request asks for something impossible.

    Args:
        field: the request's field at fault, as the caller spelled it.
        message: what is wrong with it and what is allowed.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[InvalidRequestError], tuple[str, str]]:
        return (type(self), (self.field, self.message))
