"""The context: owner of all memory of the library, and the rules that make it safe to use
from Python.

Every object and every array that refers to memory of a context holds a reference to its
Context; the last one to go destroys it. A context is used by one thread at a time, and
only in the process that made it. Objects of a context that are no longer used are freed by
the next call, because Python can collect them while another thread is in the library.
"""
import collections
import contextlib
import ctypes
import os
import threading
import weakref
from typing import Any, Callable, Deque, Iterator, List, Optional, Tuple

import numpy as np

from . import _errors
from ._library import Library, find

lib = Library(*find())


class Buffer:
    """What an array refers to: the address of memory, and its owner. numpy keeps it alive
    as the base of the array."""

    def __init__(self, owner: Any, address: int, shape: Tuple[int, ...],
                 strides: Tuple[int, ...], writable: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, not writable), "shape": shape,
                                    "strides": strides, "typestr": "=f4", "version": 3}


def array_of(owner: Any, address: int, shape: Tuple[int, ...], writable: bool = True,
             stride: int = 0) -> Tuple["np.ndarray[Any, np.dtype[np.float32]]", Buffer]:
    """An array of floats in memory of the library. stride: elements from one index of the
    first dimension to the next; 0: no gaps."""
    strides = [4] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    if stride:
        strides[0] = 4 * stride
    buffer = Buffer(owner, address, shape, tuple(strides), writable)
    return np.asarray(buffer), buffer


def _destroy(address: int, process: int) -> None:
    if os.getpid() == process:          # a fork has no threads to end
        lib.stx_destroy(address)


class Context:
    """Options are the fields of stx_desc: threads, seed, precision, max_bytes, .."""

    def __init__(self, **options: Any) -> None:
        address = lib.stx_create(ctypes.byref(fill(lib.stx_desc(), "STX_PREC", options)))
        if not address:
            raise _errors.OutOfMemoryError("out of memory: cannot create a context")
        self._address = address
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._unused: Deque[Tuple[Callable[[int], None], int]] = collections.deque()
        self.steps = 0                  # number of calls of begin()
        weakref.finalize(self, _destroy, address, self._process).atexit = False
        with self.use():
            pass

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Locks the context for calls of the library. Raises the library's error at the
        end and clears it."""
        if os.getpid() != self._process:
            raise _errors.Error("seqtx: the model was created in another process: create or open "
                                "it after the fork")
        with self._lock:
            while self._unused:
                free, what = self._unused.popleft()
                free(what)
            try:
                yield self._address
            finally:
                code = lib.stx_error_code(self._address)
                text = lib.stx_error(self._address).decode(errors="replace")
                if code:
                    lib.stx_clear_error(self._address)
            if code:
                raise error(code, text)

    def begin(self, mode: int) -> None:
        """stx_begin: tensors of earlier steps are invalid from here on."""
        self.steps += 1
        lib.stx_begin(self._address, mode)

    def free_with(self, owner: Any, free: Callable[[int], None],
                  address: int) -> "weakref.finalize[Any, Any]":
        """Calls free(address) some time after `owner` is no longer used, or after the result
        is called."""
        done = weakref.finalize(owner, self._unused.append, (free, address))
        done.atexit = False
        return done


def error(code: int, text: str) -> _errors.Error:
    """The exception for an error of the library."""
    kind = _errors.Error
    for name, its_kind in _errors.CLASSES.items():
        if getattr(lib, name) == code:
            kind = its_kind
    made = kind(text)
    made.code = code
    return made


def fill(desc: Any, prefix: str, values: Any, keep: Optional[List[Any]] = None) -> Any:
    """Sets fields of a desc, or of the desc nested in it. A string names a constant:
    compress="conv" is STX_COMP_COMPRESS_CONV if prefix is STX_COMP. Lists fill arrays, and
    set the count of their elements; `keep` receives what the desc points to."""
    fields = dict(desc._fields_)
    nested = [f for f, t in desc._fields_ if issubclass(t, ctypes.Structure)]
    for name, value in values.items():
        if name not in fields:
            for inner in nested:
                if name in dict(fields[inner]._fields_):
                    fill(getattr(desc, inner), prefix, {name: value}, keep)
                    break
            else:
                known = list(fields) + [f for n in nested for f, _ in fields[n]._fields_]
                raise TypeError(f"unexpected argument {name!r}; the arguments are "
                                + ", ".join(k for k in known if k not in nested))
            continue
        kind = fields[name]
        if isinstance(value, (list, tuple, np.ndarray)):
            _fill_list(desc, name, kind, list(value), keep)
        elif kind is ctypes.c_char_p:
            setattr(desc, name, value.encode() if isinstance(value, str) else value)
        elif isinstance(value, str):
            setattr(desc, name, _constant(prefix, name, value))
        else:
            try:
                setattr(desc, name, kind(value).value)
            except TypeError as e:
                raise TypeError(f"{name}: {e}") from None
            if getattr(desc, name) != value:
                raise ValueError(f"{name}: {value} does not fit")
    return desc


def _fill_list(desc: Any, name: str, kind: Any, values: List[Any],
               keep: Optional[List[Any]]) -> None:
    if kind is ctypes.c_void_p and keep is not None:            # const size_t *
        storage = (ctypes.c_size_t * max(1, len(values)))(*(int(v) for v in values))
        keep.append(storage)
        setattr(desc, name, ctypes.addressof(storage))
    elif issubclass(kind, ctypes.Array):
        if len(values) > kind._length_:
            raise ValueError(f"{name}: expected at most {kind._length_} values, got {len(values)}")
        getattr(desc, name)[:len(values)] = values
    else:
        raise TypeError(f"{name}: expected one value, got a list")
    for count in (name + "s", name.split("_")[0] + "_count"):
        if count in dict(desc._fields_) and count != name:
            setattr(desc, count, len(values))


def _constant(prefix: str, field: str, value: str) -> int:
    word = value.upper().replace("-", "_").replace("+", "P")
    for name in (value, f"{prefix}_{field.upper()}_{word}", f"{prefix}_{word}"):
        if name in lib._api["constants"]:
            return int(lib._api["constants"][name])
    raise ValueError(f"{field}: expected a number or the name of a constant, got {value!r}")
