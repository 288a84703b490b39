"""A pickle makes plain containers and arrays of plain numbers, or nothing, in bounded memory."""

import pickle
import pickletools
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jgesr_lightning.data.unpickle import array_of, load_arrays

PLAIN = st.sampled_from(["u1", "i8", "<f4", ">f4", ">i2", "f8", "?"])


@given(hnp.arrays(PLAIN, hnp.array_shapes(max_dims=3, min_side=0)), st.sampled_from([0, 1, 2, 3, 4]))
def test_arrays_come_back(array, protocol):
    for each in (array, np.asfortranarray(array)):
        found = array_of(load_arrays(pickle.dumps({"data": each}, protocol=protocol))["data"])
        assert found.dtype == each.dtype and np.array_equal(found, each, equal_nan=each.dtype.kind == "f")


def test_a_batch_as_python_2_wrote_it():
    batch = (
        b"(dp1\nS'data'\np2\ncnumpy.core.multiarray\n_reconstruct\np3\n(cnumpy\nndarray\np4\n(I0\ntS'b'\ntRp5\n(I1\n(I2\nI3\nt"
        b"cnumpy\ndtype\np6\n(S'u1'\nI0\nI1\ntRp7\n(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nS'abcdef'\ntbsS'labels'\n(lp8\nI6\naI9\nas."
    )
    found = load_arrays(batch)
    assert found["labels"] == [6, 9]
    assert array_of(found["data"]).tobytes() == b"abcdef" and array_of(found["data"]).shape == (2, 3)


def forged(code, shape=(10,), content=b"\x41" * 80):
    """Return a pickle that asks numpy for an array of `code` over bytes of the file's choosing."""
    return (
        b"\x80\x02cnumpy\nndarray\n(K"
        + bytes(shape)
        + b"t"
        + b"cnumpy\ndtype\nU"
        + bytes([len(code)])
        + code
        + b"\x85RU"
        + bytes([len(content)])
        + content
        + b"\x87R."
    )


class Forged:
    """An array that is rebuilt from a state of the test's choosing."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return np.empty(0).__reduce__()[0], (np.ndarray, (0,), b"b"), self.state


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (forged(b"O"), "array of 'O'"),
        (forged(b"u1"), "UnpicklingError|not callable"),
        (pickle.dumps(np.array([{}, None], dtype=object)), "array of 'O"),
        (pickle.dumps(np.zeros(2, dtype="i4,f4")), "array of 'V8'"),
        (pickle.dumps(np.array(["a", "b"])), "array of 'U1'"),
        (pickle.dumps(np.zeros(2, dtype="M8[s]")), "array of 'M8'"),
        (pickle.dumps(Forged((1, (3,), np.dtype("f8"), False, b"1234567")), 2), r"float64 \(3,\) in 7 bytes"),
        (pickle.dumps(Forged((1, (-1, -8), np.dtype("u1"), False, b"12345678")), 2), r"shape \(-1, -8\)"),
        (pickle.dumps(Forged((1, (8,), np.dtype("u1"), False, [1] * 8)), 2), "not made of shape, type and bytes"),
        (pickle.dumps(Forged((1, (8,), "u1", False, b"12345678")), 2), "not made of shape, type and bytes"),
        (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"cnumpy\ndtype\n}S'_call'\nS'x'\nsb.", "change a function"),
        (b"cnumpy\ndtype\nN}S'_call'\nS'x'\ns\x86b.", "change a function"),
        (b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.", "encoding of its own"),
        (b"(S'x'\ncnumpy\ndtype\no.", "OBJ"),
        (b"Px\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (b"", "pickle exhausted|not enough"),
        (b"r\xff\xff\xff\x7f.", "more objects"),  # a place in a memo of 2^31
        (b"\x8e" + b"\xff" * 7 + b"\x7f" + b"x.", "expected|BINBYTES8"),
        (b"}" * 1_000_001 + b".", "more objects"),
        (b"]\x94" + b"h\x00" * 5, "exhausted"),
        (b"0.", "IndexError|stack|underflow"),
    ],
)
def test_anything_else_is_refused(content, message):
    with pytest.raises(pickle.UnpicklingError, match=message) as caught:
        load_arrays(content)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_bytes_cannot_be_made_out_of_one_text_again_and_again():
    text = b"X" + (1000).to_bytes(4, "little") + b"a" * 1000 + b"\x94"
    once = b"c_codecs\nencode\n\x94(h\x00X\x06\x00\x00\x00latin1tR0"
    pickled = b"\x80\x04" + text + b"0" + once
    assert load_arrays(pickled + b"N.") is None
    with pytest.raises(pickle.UnpicklingError, match="fewer bytes than it makes"):
        load_arrays(pickled + b"h\x01(h\x00X\x06\x00\x00\x00latin1tR0" * 5000 + b"N.")


def test_lists_that_stand_for_more_than_any_memory_holds_are_no_array():
    laughs = b"]\x94" + b"".join(b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94" for i in range(60))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="something else"):
        array_of(load_arrays(b"\x80\x04" + laughs + b"."))
    with pytest.raises(pickle.UnpicklingError, match=r"array of \[\["):
        load_arrays(b"\x80\x04" + laughs + b"cnumpy\ndtype\nh\x3c\x85R.")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_the_opcodes_are_pythons():
    from jgesr_lightning.data.unpickle import OPCODES

    assert {opcode.name for opcode in pickletools.opcodes} >= OPCODES


def as_python_2_wrote_it(data, labels, names):
    """Return a batch in the opcodes of Python 2's cPickle, protocol 2, as the published files have them."""
    places = iter(range(1_000_000))

    def put():
        place = next(places)
        return b"q" + bytes([place]) if place < 256 else b"r" + place.to_bytes(4, "little")

    def text(value):
        size = bytes([len(value)]) if len(value) < 256 else len(value).to_bytes(4, "little")
        return (b"U" if len(value) < 256 else b"T") + size + value + put()

    def whole(value):
        return b"K" + bytes([value]) if value < 256 else b"M" + value.to_bytes(2, "little")

    array = b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put() + b"K\x00\x85" + put()
    array += text(b"b") + b"\x87" + put() + b"R" + put() + b"(K\x01" + whole(data.shape[0]) + whole(data.shape[1])
    array += b"\x86" + put() + b"cnumpy\ndtype\n" + put() + text(b"u1") + b"K\x00K\x01\x87" + put() + b"R" + put()
    array += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t" + put() + b"b\x89"
    array += text(data.tobytes()) + b"t" + put() + b"b"
    content = b"\x80\x02}" + put() + b"(" + text(b"batch_label") + text(b"training batch 1 of 5")
    content += text(b"labels") + b"]" + put() + b"(" + b"".join(map(whole, labels)) + b"e"
    content += text(b"data") + array + text(b"filenames") + b"]" + put() + b"(" + b"".join(map(text, names)) + b"eu."
    return content


def test_a_published_batch_is_read():
    rng = np.random.default_rng(0)
    data, labels = rng.integers(0, 256, (400, 3072), dtype=np.uint8), rng.integers(0, 10, 400).tolist()
    names = [f"leptodactylus_pentadactylus_s_{i:06d}.png".encode() for i in range(400)]
    content = as_python_2_wrote_it(data, labels, names)
    reference = pickle.loads(content, encoding="latin1")  # the opcodes are Python's: its own unpickler reads them
    assert np.array_equal(reference["data"], data)
    found = load_arrays(content)
    assert found.keys() == reference.keys()
    assert np.array_equal(array_of(found["data"]), data)
    assert found["labels"] == reference["labels"] == labels
    assert found["filenames"] == reference["filenames"]
