"""Every file of eight_devices/ has a test beside this one that runs it."""

from pathlib import Path

HERE = Path(__file__).parent


def test_every_file_is_run():
    run = {path.stem.removeprefix("test_eight_") for path in HERE.glob("test_eight_*.py")} - {"devices"}
    assert run == {path.stem for path in (HERE / "eight_devices").glob("*.py")}
