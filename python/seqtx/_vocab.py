"""Vocabularies: text to token ids and back."""
import ctypes
import os
from typing import Any, Iterable, Optional, Union

import numpy as np

from ._context import Context, fill, lib

Text = Union[str, bytes]

# The text of a piece has no terminating zero, so it is an address here.
_piece = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)(
    ("stx_vocab_piece", lib._dll))
KINDS = {"bytes": "STX_TOK_BYTES", "chars": "STX_TOK_CHARS", "words": "STX_TOK_WORDS",
         "spm": "STX_TOK_PIECES", "ids": "STX_TOK_IDS"}


def as_bytes(text: Text) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)


def as_path(path: "os.PathLike[str] | str") -> bytes:
    """A path for C, which would end it at a zero byte."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError(f"path: expected no zero byte, got {name!r}")
    return name


class Vocab:
    """A vocabulary, as a checkpoint contains it or built from a text file.

    Vocab() has the 256 bytes. Vocab("chars", "my.txt") and Vocab("words", "my.txt") have
    what occurs in the file; other keyword arguments are the fields of stx_vocab_desc, such
    as min_count=2. len(vocab) is the number of ids."""

    def __init__(self, kind: str = "bytes", path: "Optional[os.PathLike[str] | str]" = None,
                 **desc: Any) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        d = fill(lib.stx_vocab_desc(), "STX", dict(desc, kind=getattr(lib, KINDS[kind])))
        size = os.path.getsize(path) if path is not None else 0
        self._make(lambda x: lib.stx_vocab_build(
            x, ctypes.byref(d), as_path(path) if path is not None else None, 0, size))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Vocab":
        """The vocabulary that to_bytes stored, which is the tensor "vocab" of a checkpoint."""
        made = cls.__new__(cls)
        made._make(lambda x: lib.stx_vocab_load(x, data, len(data)))
        return made

    def _make(self, create: Any) -> None:
        self._context = Context(threads=1)
        with self._context.use() as x:
            self._v = create(x)
        self.kind = {getattr(lib, v): k for k, v in KINDS.items()}[lib.stx_vocab_kind(self._v)]

    def to_bytes(self) -> bytes:
        """The vocabulary in the form that checkpoints store."""
        with self._context.use():
            n = lib.stx_vocab_save(self._v, None, 0)
            data = ctypes.create_string_buffer(n)
            lib.stx_vocab_save(self._v, data, n)
        return data.raw

    def __len__(self) -> int:
        return int(lib.stx_vocab_size(self._v))

    def __repr__(self) -> str:
        return f"<Vocab of {len(self)} {self.kind}>"

    @property
    def eos(self) -> Optional[int]:
        """The id of <eos>, or None."""
        return _id(lib.stx_vocab_eos(self._v))

    @property
    def unk(self) -> Optional[int]:
        """The id of <unk>, or None."""
        return _id(lib.stx_vocab_unk(self._v))

    def find(self, piece: Text) -> Optional[int]:
        """The id of a piece, or None."""
        piece = as_bytes(piece)
        return _id(lib.stx_vocab_find(self._v, piece, len(piece)))

    def piece(self, id: int) -> bytes:
        """The bytes of an id. The piece of a line end is b"<eos>"."""
        n = ctypes.c_size_t()
        text = _piece(self._v, int(id), ctypes.byref(n))
        if not text:
            raise IndexError(f"id {id}: expected 0 to {len(self) - 1}")
        return ctypes.string_at(text, n.value)

    def encode(self, text: Text, part: bool = False) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """The ids of a text. part=True: the text continues another one, so that U+FEFF at
        its start is a character."""
        data = as_bytes(text)
        encode = lib.stx_vocab_encode_part if part else lib.stx_vocab_encode
        with self._context.use():
            n = encode(self._v, data, len(data), None, 0)
            ids = np.empty(n if n != lib.STX_NPOS else 0, np.int32)
            if n != lib.STX_NPOS:
                encode(self._v, data, len(data), ids.ctypes.data, n)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the text of ids."""
        array = as_ids(ids).ravel()
        with self._context.use():
            n = lib.stx_vocab_decode(self._v, array.ctypes.data, array.size, None, 0)
            text = ctypes.create_string_buffer(n if n != lib.STX_NPOS else 1)
            if n != lib.STX_NPOS:
                lib.stx_vocab_decode(self._v, array.ctypes.data, array.size, text, n)
        return text.raw

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def _id(value: int) -> Optional[int]:
    return None if value < 0 else int(value)


def as_ids(ids: Any) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Token ids as a dense array of int32; other kinds of numbers are refused."""
    array = np.asarray(ids if hasattr(ids, "__len__") else list(ids))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"expected token ids, got an array of {array.dtype}; encode() a text first")
    if array.size and (array.min() < 0 or array.max() > 2**31 - 1):
        raise ValueError("token ids must be between 0 and 2^31 - 1")
    return np.ascontiguousarray(array, np.int32)
