"""The GGUF container: values and tensors against the gguf package's writer, quantised blocks decoded by hand, broken files."""

import struct

import gguf
import ml_dtypes
import numpy as np
import pytest

from checkpoints.gguf_file import GGUFFile
from checkpoints.weights import WeightsError


def write(path, tensors=(), **values):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        writer.add_key_value(key, *value)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_values_of_every_kind(tmp_path):
    kind = gguf.GGUFValueType
    values = {
        "u8": (255, kind.UINT8), "i8": (-128, kind.INT8), "u16": (65535, kind.UINT16), "i16": (-2, kind.INT16),
        "u32": (2**32 - 1, kind.UINT32), "i32": (-(2**31), kind.INT32), "u64": (2**64 - 1, kind.UINT64),
        "i64": (-(2**63), kind.INT64), "f32": (0.5, kind.FLOAT32), "f64": (1e-300, kind.FLOAT64),
        "yes": (True, kind.BOOL), "text": ("é\n🙂", kind.STRING),
    }  # fmt: skip
    values["words"] = (["", "ab", "ü"], kind.ARRAY)
    values["numbers"] = ([1, -2, 3], kind.ARRAY)
    values["reals"] = ([0.5, -0.25], kind.ARRAY)
    values["flags"] = ([True, False], kind.ARRAY)
    file = GGUFFile(write(tmp_path / "x.gguf", **values))
    assert file.metadata == {"general.architecture": "llama"} | {key: value for key, (value, _) in values.items()}
    assert file.metadata["flags"][0] is True and file.tensors == {}


def test_reads_plain_tensors_of_every_dtype(tmp_path):
    arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.array([[0.5], [-2]], np.float16),
        "i8": np.array([1, -1, 3], np.int8),
        "i16": np.array([-300], np.int16),
        "i32": np.array([[[70000]]], np.int32),
        "f64": np.array([1e-300], np.float64),
    }
    bf16 = np.array([[1.0, -3.0]], ml_dtypes.bfloat16)
    plain = [(name, array, None) for name, array in arrays.items()]
    tensors = [*plain, ("bf16", bf16.view(np.uint8), gguf.GGMLQuantizationType.BF16)]
    file = GGUFFile(write(tmp_path / "x.gguf", tensors))
    for name, array in (arrays | {"bf16": bf16}).items():
        read = file.read(name)
        assert file.tensors[name].shape == array.shape and file.tensors[name].dtype == array.dtype.name
        assert read.dtype == array.dtype and read.flags.owndata and read.flags.writeable
        np.testing.assert_array_equal(read, array)


def test_alignment_of_the_file_is_kept(tmp_path):
    arrays = [("a", np.array([1], np.float32), None), ("b", np.array([2, 3], np.float32), None)]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    for name, array, _ in arrays:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.read("a").tolist() == [1] and file.read("b").tolist() == [2, 3]
    assert file.tensors["b"].start % 256 == 0


def test_decodes_quantised_blocks(tmp_path):
    # ggml-common.h: a Q8_0 block is a half scale and 32 signed bytes; a Q4_1 block a half scale, a half minimum and 16 bytes, whose
    # low nibbles are the first 16 values and whose high nibbles the last 16.
    eights = np.arange(-16, 16, dtype=np.int8)
    q8 = struct.pack("<e", 0.25) + eights.tobytes()
    nibbles = bytes(low | (15 - low) << 4 for low in range(16))
    q4 = struct.pack("<ee", 0.5, -3.0) + nibbles
    tensors = [
        ("q8", np.frombuffer(q8 * 2, np.uint8).reshape(2, 34), gguf.GGMLQuantizationType.Q8_0),
        ("q4", np.frombuffer(q4, np.uint8).reshape(1, 20), gguf.GGMLQuantizationType.Q4_1),
    ]
    file = GGUFFile(write(tmp_path / "x.gguf", tensors))
    assert file.tensors["q8"].shape == (2, 32) and file.tensors["q8"].dtype == "Q8_0"
    assert file.read("q8").dtype == np.float32
    np.testing.assert_array_equal(file.read("q8"), np.stack([eights * 0.25] * 2))
    np.testing.assert_array_equal(file.read("q4"), [[*(0.5 * n - 3 for n in range(16)), *(0.5 * (15 - n) - 3 for n in range(16))]])


def test_quantisation_that_is_not_decoded_is_named(tmp_path):
    data = np.zeros((1, 292), np.uint8)
    file = GGUFFile(write(tmp_path / "x.gguf", [("w", data, gguf.GGMLQuantizationType.Q8_K)]))
    with pytest.raises(WeightsError, match=r"w in .*x\.gguf is quantised as Q8_K, which is not supported"):
        file.read("w")


def test_file_cut_short_anywhere(tmp_path):
    values = {"words": (["ab", "cd"], gguf.GGUFValueType.ARRAY), "number": (7, gguf.GGUFValueType.UINT32)}
    path = write(tmp_path / "x.gguf", [("w", np.ones(16, np.float32), None)], **values)
    whole = path.read_bytes()
    for length in range(4, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"x\.gguf is corrupt or cut short"):
            GGUFFile(path)


def test_file_that_is_something_else(tmp_path):
    path = tmp_path / "x.gguf"
    for content in (b"", b"GGU", b"version https://git-lfs.github.com/spec/v1"):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="is not a GGUF file"):
            GGUFFile(path)
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "absent.gguf")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(WeightsError, match="is GGUF version 1; supported: 2, 3"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(WeightsError, match="is big-endian"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99))
    with pytest.raises(WeightsError, match="corrupt or cut short: 99 is not a valid GGUFValueType"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62))
    with pytest.raises(WeightsError, match="corrupt or cut short: 4611686018427387904 bytes are announced"):
        GGUFFile(path)
