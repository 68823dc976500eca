"""Exceptions with the library's error texts."""
from typing import Dict, Type


class Error(Exception):
    """An error of the library; str() is its text. `code` is one of STX_ERR_.."""
    code: int = 0


class ArgumentError(Error, ValueError):
    """An argument, an option or a shape is wrong."""


class OutOfMemoryError(Error, MemoryError):
    """Memory ran out, or max_bytes was exceeded."""


class FileError(Error, OSError):
    """A file cannot be read or written."""


class FormatError(Error, ValueError):
    """The contents of a file or a text are invalid or unexpected."""


CLASSES: Dict[str, Type[Error]] = {
    "STX_ERR_ARG": ArgumentError, "STX_ERR_SHAPE": ArgumentError,
    "STX_ERR_MEMORY": OutOfMemoryError, "STX_ERR_IO": FileError, "STX_ERR_FORMAT": FormatError}
