"""Files of torch.save, read without torch: what torch wrote (tests/goldens/make_medusa_goldens.py), and what is refused."""

import pickle
import shutil
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from checkpoints.torch_file import TorchReader
from checkpoints.weights import WeightsError
from tests.goldens.golden import HERE

FOLDER = HERE / "medusa"


def test_tensors_are_torchs():
    reader = TorchReader(FOLDER / "tensors.pt")
    with np.load(FOLDER / "tensors.npz") as expected:
        assert sorted(reader.keys()) == sorted(expected)
        for name in expected:
            found = reader.read(name)
            assert reader.shape(name) == found.shape and reader.dtype(name) == found.dtype.name
            assert reader.dtype(name) == (name if name in ("bfloat16", "float16", "int64", "bool") else expected[name].dtype.name)
            np.testing.assert_array_equal(found.astype(expected[name].dtype), expected[name])
            assert found.flags.writeable and found.base is None


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def write(path, found, *, data: bytes = b"", members: tuple[str, ...] = ("a/data.pkl",), byteorder: bytes = b"little"):
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(name, found if isinstance(found, bytes) else pickle.dumps(found, protocol=2))
        archive.writestr("a/byteorder", byteorder)
        archive.writestr("a/data/0", data)
    return path


def test_no_code_of_a_pickle_runs(tmp_path):
    mark = tmp_path / "was_here"
    for evil in (Calls(mark.mkdir), Calls(eval, f"open({str(mark)!r}, 'w')"), OrderedDict(a=Calls(shutil.rmtree, "/nowhere"))):
        path = write(tmp_path / "evil.pt", evil)
        with pytest.raises(WeightsError, match=r"evil.pt: its pickle asks for \S+, and only tensors are read"):
            TorchReader(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Calls(mark.mkdir)))
    assert mark.exists(), "the same pickle does run elsewhere"


def tensor_pickle(shape: str, stride: str, offset: int = 0, size: int = 6) -> bytes:
    """{"x": a tensor of a storage of so many float32}, in pickle's text protocol."""
    storage = f"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI{size}\ntQ"
    return f"(dS'x'\nctorch._utils\n_rebuild_tensor_v2\n({storage}I{offset}\n{shape}{stride}I00\nNtRs.".encode()


def ints(*numbers: int) -> str:
    return "(" + "".join(f"I{n}\n" for n in numbers) + "t"


def test_a_tensor_must_lie_in_its_storage(tmp_path):
    data = np.arange(6, dtype=np.float32).tobytes()
    path = write(tmp_path / "x.pt", tensor_pickle(ints(2, 2), ints(2, 1), offset=1), data=data)
    np.testing.assert_array_equal(TorchReader(path).read("x"), [[1, 2], [3, 4]])
    for shape, stride, offset, message in (
        (ints(2, 3), ints(3, 1), 1, "which its storage does not hold"),
        (ints(-1, 3), ints(3, 1), 0, "which its storage does not hold"),
        (ints(3, 2), ints(1, 3), 0, r"strides \(1, 3\): save it contiguous"),
        (ints(6), ints(0), 0, r"strides \(0,\): save it contiguous"),
    ):
        with pytest.raises(WeightsError, match=message):
            TorchReader(write(tmp_path / "x.pt", tensor_pickle(shape, stride, offset), data=data))
    cut = TorchReader(write(tmp_path / "x.pt", tensor_pickle(ints(6), ints(1)), data=data[:20]))
    with pytest.raises(WeightsError, match="has 20 bytes of the storage of x"):
        cut.read("x")


def test_what_is_no_state_dict_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    for found, message in (
        ([1, 2], "holds a list, and a state dict is wanted"),
        ({"lr": 0.1}, "these are not tensors: lr"),
        (b"no pickle", "its pickle can't be read"),
    ):
        with pytest.raises(WeightsError, match=message):
            TorchReader(write(path, found))
    with pytest.raises(WeightsError, match="has 0 members named data.pkl"):
        TorchReader(write(path, {}, members=()))
    with pytest.raises(WeightsError, match="big-endian"):
        TorchReader(write(path, {}, byteorder=b"big"))
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(WeightsError, match=r"x.pt is not an archive of torch.save .*before 1.6"):
        TorchReader(path)
