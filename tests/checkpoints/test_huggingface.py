"""Hugging Face folders: finding them, and reading safetensors whole, sharded and broken."""

import json
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from checkpoints.huggingface import INDEX_NAME, SafetensorsReader, read_json, resolve
from checkpoints.weights import WeightsError


def write_sharded(folder: Path, shards: dict[str, dict[str, np.ndarray]]) -> None:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def two_shards() -> dict[str, dict[str, np.ndarray]]:
    return {"a.safetensors": {"x": np.ones(2, np.float32)}, "b.safetensors": {"y": np.ones(3, np.float32)}}


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_reads_one_file_in_every_float_dtype(tmp_path, name):
    tensors = {
        "f32": np.array([[1.5, -2.0]], np.float32),
        "f16": np.array([0.25], np.float16),
        "bf16": np.array([3.0, 1.0], ml_dtypes.bfloat16),
        "scalar": np.array(4.0, np.float32),
    }
    save_file(tensors, tmp_path / name)
    reader = SafetensorsReader(tmp_path)
    assert set(reader.keys()) == set(tensors)
    for key, tensor in tensors.items():
        assert reader.shape(key) == tensor.shape and reader.dtype(key) == tensor.dtype.name
        assert reader.read(key).dtype == tensor.dtype
        np.testing.assert_array_equal(reader.read(key), tensor)


def test_model_safetensors_is_taken_before_other_files(tmp_path):
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    save_file({"y": np.ones(1, np.float32)}, tmp_path / "consolidated.safetensors")
    assert list(SafetensorsReader(tmp_path).keys()) == ["x"]


def test_reads_shards_by_index_and_shows_what_the_index_leaves_out(tmp_path):
    shards = two_shards()
    write_sharded(tmp_path, shards)
    save_file(shards["b.safetensors"] | {"hidden": np.zeros(1, np.float32)}, tmp_path / "b.safetensors")
    save_file({"z": np.ones(1, np.float32)}, tmp_path / "stray.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert set(reader.keys()) == {"x", "y", "hidden"}
    assert reader.read("y").tolist() == [1, 1, 1]


def test_names_float8_and_integer_tensors(tmp_path):
    save_file({"q": np.ones(2, ml_dtypes.float8_e4m3fn), "i": np.ones(2, np.int8)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert reader.dtype("q") == "float8_e4m3fn" and reader.dtype("i") == "int8"


def test_every_absent_or_broken_shard_is_listed(tmp_path):
    shards = two_shards() | {n + ".safetensors": {n: np.ones(9, np.float32)} for n in ("cut", "lfs", "empty")}
    write_sharded(tmp_path, shards)
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    (tmp_path / "lfs.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError) as caught:
        SafetensorsReader(tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(" ")[2] for line in lines] == [f"{n}.safetensors" for n in ("a", "cut", "empty", "lfs")]
    assert f"absent, but {INDEX_NAME} names it" in lines[0] and "cut short" in lines[1] and "git lfs pull" in lines[3]


def test_index_that_places_a_tensor_where_it_is_not(tmp_path):
    write_sharded(tmp_path, two_shards())
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"x": "a.safetensors", "lost": "b.safetensors"}}')
    with pytest.raises(WeightsError, match="places lost in b.safetensors, which does not hold it"):
        SafetensorsReader(tmp_path)
    write_sharded(tmp_path, two_shards())
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}')
    with pytest.raises(WeightsError, match="places x in b.safetensors, which does not hold it"):
        SafetensorsReader(tmp_path)


def test_two_shards_with_one_tensor(tmp_path):
    write_sharded(tmp_path, {"a.safetensors": {"x": np.ones(1, np.float32)}, "b.safetensors": {"y": np.ones(1, np.float32)}})
    save_file({"y": np.ones(1, np.float32), "x": np.zeros(1, np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match="b.safetensors holds x, which another file holds too"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_index_that_is_no_index(tmp_path, index):
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(WeightsError, match=INDEX_NAME):
        SafetensorsReader(tmp_path)


def test_folder_without_weights_says_what_it_has(tmp_path):
    with pytest.raises(WeightsError, match="no safetensors file$"):
        SafetensorsReader(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"pickled weights \(pytorch_model.bin\) are not read"):
        SafetensorsReader(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": np.ones(1, np.float32)}, tmp_path / name)
    with pytest.raises(WeightsError, match=r"several safetensors files \(a.safetensors, b.safetensors\) and no"):
        SafetensorsReader(tmp_path)


def test_read_json(tmp_path):
    assert read_json(tmp_path, "config.json") is None
    (tmp_path / "config.json").write_text('{"a": "é"}', encoding="utf-8")
    assert read_json(tmp_path, "config.json") == {"a": "é"}
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, found a list"):
        read_json(tmp_path, "config.json")


def test_resolve_takes_a_path_that_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("must not ask the hub"))
    (tmp_path / "model.gguf").touch()
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="revision='main' needs a Hugging Face id"):
        resolve(tmp_path, revision="main")
    for absent in (tmp_path / "nothing", "./here", "owner/name/deeper", "models/absent.gguf", "", "two words"):
        with pytest.raises(FileNotFoundError, match="not a file or folder here, and cannot be a Hugging Face id"):
            resolve(absent)


def test_resolve_downloads_an_id_at_its_revision(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(model_id, *, revision, **patterns):
        asked.append((model_id, revision))
        files = ["config.json", "model-1-of-2.safetensors", "model.bin", "consolidated.safetensors", "original/x.safetensors"]
        assert list(filter_repo_objects(files, **patterns)) == files[:2]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/a-model.v2", revision="abc") == tmp_path
    assert asked == [("owner/a-model.v2", "abc")]


# As much of an HTTP response as huggingface_hub's errors look at.
RESPONSE: Any = types.SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    "error, says",
    [
        (errors.LocalEntryNotFoundError("no network"), "cannot be downloaded now.*local copy, or connect.*no network"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be downloaded now.*local copy, or connect.*offline"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "neither a folder here nor a model on Hugging Face"),
        (errors.RevisionNotFoundError("404", response=RESPONSE), "neither a folder here nor a model on Hugging Face"),
        (errors.GatedRepoError("403", response=RESPONSE), "gated: accept its terms"),
    ],
)
def test_resolve_says_why_an_id_cannot_be_had(monkeypatch, error, says):
    def snapshot_download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=f"(?s)^'owner/model' .*{says}"):
        resolve("owner/model")


def test_resolve_offline_finds_what_was_downloaded_before(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve("owner/model") == snapshot
    with pytest.raises(FileNotFoundError, match="'owner/other' is not a folder here, not in the Hugging Face cache"):
        resolve("owner/other")
