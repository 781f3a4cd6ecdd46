"""The order of the stations, as tests/tools/house.py writes it down, holds; and the check finds what breaks it."""

from pathlib import Path

import pytest

from tests.tools import house

PACKAGE = house.ROOT / "jaxserve"


@pytest.fixture(scope="module")
def arrows():
    return house.graph(PACKAGE)


def test_no_circle(arrows):
    assert len(arrows) > 100
    assert house.circles(arrows) == []


def test_no_arrow_goes_up(arrows):
    assert list(house.upward(arrows)) == []


def test_every_station_has_a_floor(arrows):
    floors = [name for floor in house.FLOORS for name in floor]
    assert len(floors) == len(set(floors))
    assert set(floors) == {house.station(name) for name in arrows} - {house.ENTRANCE}


def test_the_entrance_hall_is_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 10


@pytest.mark.parametrize("name", ["jaxserve", "kernels", "checkpoints"])
def test_no_file_and_no_function_is_too_long(name: str):
    assert house.too_long(house.ROOT / name) == []


def test_what_is_too_long_is_found(tmp_path: Path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "fits.py").write_text("def fits():\n" + "    pass\n" * 59 + "x = 1\n" * 440)
    (package / "long.py").write_text("class C:\n    async def long(self):\n" + "        pass\n" * 60 + "x = 1\n" * 439)
    assert house.too_long(package) == ["pack/long.py: 501", "pack/long.py::long: 61"]


@pytest.mark.parametrize(
    "text",
    [
        "from pack.b import thing",
        "import pack.b",
        "from . import b",
        "from .b import thing",
        "def late():\n    from pack import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.b import thing",
    ],
)
def test_a_circle_is_found_wherever_it_hides(tmp_path: Path, text: str):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(text)
    (package / "b.py").write_text("from pack.c import thing")
    (package / "c.py").write_text("import pack.a")
    assert house.circles(house.graph(package)) == [["pack.a", "pack.b", "pack.c"]]


def test_a_stub_counts(tmp_path: Path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__init__.pyi").write_text("from pack.a import thing as thing")
    (package / "a.py").write_text("import pack")
    assert house.circles(house.graph(package)) == [["pack", "pack.a"]]


def test_an_arrow_up_is_found():
    floors = (("attic",), ("hall", "stairs"), ("cellar",))
    arrows = {
        "house.hall.door": {"house.cellar.wine", "house.hall.mat", "house.stairs.rail", "house.attic.box", "house"},
        "house.cellar.wine": {"house.hall"},
        "house": {"house.attic.box"},
    }
    assert list(house.upward(arrows, floors)) == [
        ("house.hall.door", "house"),
        ("house.hall.door", "house.attic.box"),
        ("house.hall.door", "house.stairs.rail"),
        ("house.cellar.wine", "house.hall"),
    ]
