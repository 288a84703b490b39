"""Read the two pickles that data sets come in without running what a pickle could run.

A pickle names functions and is free in what it calls them with, so none of numpy's is admitted: ``ndarray((10,),
dtype("O"), bytes)`` alone makes an array of forged pointers. Stand-ins take their place, which keep what an array was
made of (shape, type, bytes) and rebuild it where all three fit together. Opcodes are read through before any is run.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

PLAIN = re.compile(r"[biuf][1248]")  # kinds of numbers that an array may hold; objects, texts and records are none
MOST_DIMS = 4
MOST_OPCODES = 1_000_000  # a batch of 10,000 images takes 61,000
OPCODES = frozenset(
    """
    PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES
    EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
    """.split()  # noqa: SIM905 - a list of 50 words a line each would hide what is missing
)


class _Dtype:
    """Stands in for numpy.dtype: a kind of plain number and its byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *flags: Any) -> None:
        if not isinstance(code, str) or not PLAIN.fullmatch(code):
            raise pickle.UnpicklingError(f"it holds an array of {_short(code)}, not of plain numbers")
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it holds an array whose type is no plain one")
        self.order = state[1]


class _Array:
    """Stands in for numpy.ndarray: keeps the array that it was given the pieces of."""

    __slots__ = ("_encode", "array")
    array: npt.NDArray[Any]

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("it holds an array in a form of its own")
        _, shape, dtype, fortran, content = state
        content = self._encode(content) if isinstance(content, str) else content  # Python 2's texts were bytes
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes) or not isinstance(shape, tuple):
            raise pickle.UnpicklingError("it holds an array that is not made of shape, type and bytes")
        kind = np.dtype(dtype.order + dtype.code)
        if len(shape) > MOST_DIMS or any(type(side) is not int or side < 0 for side in shape):
            raise pickle.UnpicklingError(f"it holds an array of shape {_short(shape)}")
        if math.prod(shape) * kind.itemsize != len(content):
            raise pickle.UnpicklingError(f"it holds an array of {kind} {_short(shape)} in {len(content)} bytes")
        self.array = np.frombuffer(content, kind).reshape(shape, order="F" if fortran is True else "C")


class _Function:
    """A function that a pickle may call, and can change nothing of."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it wants to change a function")


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that knows plain containers and arrays of plain numbers, and refuses everything else."""

    def __init__(self, content: bytes | memoryview) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._room = len(content)  # what is rebuilt from a file takes no more bytes than the file
        reconstruct = _Function(lambda *args: _Array(self._encode))
        self._allowed: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
            ("numpy", "ndarray"): None,  # named as an argument, never called
            ("numpy", "dtype"): _Function(_Dtype),
            ("_codecs", "encode"): _Function(self._encode),
            ("__builtin__", "bytes"): _Function(lambda: b""),  # as no bytes at all are written into old pickles
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the stand-ins, or raise UnpicklingError."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which no array needs") from None

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        """Return the bytes that a text stands for in old pickles."""
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("it holds bytes in an encoding of its own")
        self._room -= len(text)
        if self._room < 0:
            raise pickle.UnpicklingError("it holds fewer bytes than it makes")
        return text.encode("latin1")


def load_arrays(content: bytes | memoryview) -> Any:
    """Return what a pickle holds, Python 2 pickles included (their texts as latin-1).

    Its arrays are had from `array_of`.

    Raises:
        pickle.UnpicklingError: it holds anything but plain containers and arrays of plain numbers, or is damaged.

    """
    try:
        _read_through(content)
        return ArrayUnpickler(content).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise pickle.UnpicklingError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return the array that an object out of `load_arrays` stands for; it shares the memory of what was read.

    Raises:
        ValueError: it stands for none. (A list does not: lists in lists can stand for more than any memory holds.)

    """
    if not isinstance(value, _Array) or not hasattr(value, "array"):
        raise ValueError("it holds something else where an array should be")
    return value.array


def _read_through(content: bytes | memoryview) -> None:
    """Raise unless a pickle is made of known opcodes that are whole, and few enough: so little memory will do."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(content))):
        if opcode.name not in OPCODES:
            raise pickle.UnpicklingError(f"it wants {opcode.name}, which no array needs")
        place = argument if opcode.name.endswith("PUT") and isinstance(argument, int) else 0
        if max(number, place) >= MOST_OPCODES:
            raise pickle.UnpicklingError("it holds more objects than any data set of this kind")


def _short(value: Any) -> str:
    return reprlib.repr(value)[:60]  # bounded, however often its parts refer to each other
