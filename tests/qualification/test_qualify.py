"""Verdicts and their record: found once, kept, waited for, and not taken for another card's."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from jaxserve.qualification import qualify as module
from jaxserve.qualification.qualify import qualify
from jaxserve.qualification.record import Record, Store
from kernels.qualification.plan import NO_MEMORY, PASSED, WRONG
from tests.qualification.conftest import CARD, HERE, LIMITS, PLAN


@pytest.fixture(autouse=True)
def _another_process(monkeypatch):
    """What earlier tests found is not known here."""
    monkeypatch.setattr(module, "_found", {})


@pytest.fixture
def ask(tmp_path, fake):
    """Of behaviours, a qualification in this test's folder."""

    def ask(card=CARD, plan=PLAN, folder=tmp_path / "cache", again=False, **behaviours):
        module._found.clear()  # as a new process would
        return qualify(card, plan, folder=folder, command=fake(**behaviours), limits=LIMITS, again=again)

    return ask


def test_a_verdict_is_kept(ask, starts, tmp_path):
    found = ask(bent="wrong")
    assert starts() == 1 and list(found.left_out("attention")) == ["bent"]
    again = ask()
    assert starts() == 1 and again.record == found.record and str(again) == str(found)
    said = str(found)
    assert "Fake 3000" in said and "attention right passed" in said
    assert "attention bent LEFT OUT, wrong values: wrong of a fake" in said and "\n" not in said
    (path,) = (tmp_path / "cache").glob("*.json")
    kept = json.loads(path.read_text())
    assert kept["card"] == dataclasses.asdict(CARD) and kept["seconds"] > 0 and kept["date"].startswith("20")
    assert kept["verdicts"]["attention bent"]["result"] == WRONG
    assert kept["verdicts"]["attention bent"]["reason"] == "wrong of a fake"
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_again_tries_what_is_known(ask, starts):
    assert ask(bent="wrong").left_out("attention") and not ask(again=True).left_out("attention")
    assert starts() == 2 and not ask(bent="wrong").left_out("attention")


def test_again_without_memory_loses_nothing_that_was_known(ask, starts):
    assert not ask().left_out("attention")
    assert ask(again=True, bent="memory", right="memory").verdicts[0].result == NO_MEMORY
    assert not ask(bent="wrong").left_out("attention") and starts() == 2


@pytest.mark.parametrize(
    "field", ["name", "compute_capability", "driver", "jax", "jaxlib", "kernels", "plugin", "ptxas", "num_sms"]
)
def test_another_card_is_another_record(ask, starts, field):
    ask(bent="wrong")
    other = ask(card=dataclasses.replace(CARD, **{field: "other"}))
    assert starts() == 2 and not other.left_out("attention")


def test_a_record_under_a_wrong_name_is_not_used(ask, starts, tmp_path, caplog):
    ask(bent="wrong")
    other = dataclasses.replace(CARD, driver="9")
    os.rename(Store(tmp_path / "cache", CARD).path, Store(tmp_path / "cache", other).path)
    assert not ask(card=other).left_out("attention") and starts() == 2 and "is of another card" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "card": {}, "verdicts": 3}', "\x00\xff"])
def test_a_corrupt_record_is_made_anew(ask, starts, tmp_path, caplog, text):
    path = Store(tmp_path / "cache", CARD).path
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    assert not ask().left_out("attention") and starts() == 1 and path.name in caplog.text
    caplog.clear()
    assert not ask().left_out("attention") and starts() == 1 and not caplog.text


def test_verdicts_of_wrong_fields_are_made_anew(ask, starts, tmp_path):
    ask()
    path = Store(tmp_path / "cache", CARD).path
    found = json.loads(path.read_text())
    found["verdicts"]["attention bent"]["shape"] = 3
    path.write_text(json.dumps(found))
    ask()
    assert starts() == 2


def test_an_unwritable_cache_is_warned_of_once_and_the_verdict_used(ask, starts, tmp_path, caplog, fake):
    folder = tmp_path / "file" / "cache"
    (tmp_path / "file").write_text("in the way")  # which root can't write through either
    assert list(ask(folder=folder, bent="wrong").left_out("attention")) == ["bent"]
    assert "can't be kept" in caplog.text
    found = qualify(CARD, PLAN, folder=folder, command=fake(), limits=LIMITS)  # another engine of this process
    assert list(found.left_out("attention")) == ["bent"] and starts() == 1
    ask(folder=folder)  # another process
    assert starts() == 2 and caplog.text.count("can't be kept") == 1


def test_what_had_no_memory_is_asked_again_by_the_next_process(ask, starts):
    found = ask(bent="memory")
    assert found.left_out("attention")["bent"].startswith(NO_MEMORY)
    assert not ask().left_out("attention") and starts() == 2


def test_what_had_no_memory_is_asked_again_by_the_next_start_of_this_process(tmp_path, fake, starts):
    """And it says so; what failed is not asked again, and what was not tried by another process alone."""

    def start(**behaviours):
        return qualify(CARD, PLAN, folder=tmp_path / "cache", command=fake(**behaviours), limits=LIMITS)

    found = start(bent="wrong", right="memory")
    assert list(found.left_out("attention")) == ["bent", "right"]
    assert "the next start of an engine tries again what had no memory" in str(found)
    assert "`jaxserve qualify --again` tries anew what failed" in str(found)
    found = start()
    assert starts() == 2 and list(found.left_out("attention")) == ["bent"]
    assert "no memory" not in str(found) and "`jaxserve qualify --again` tries anew what failed" in str(found)
    assert str(start()) == str(found) and starts() == 2


def test_a_process_that_can_not_be_started_is_not_tried_by_every_engine(tmp_path, fake, starts):
    found = qualify(CARD, PLAN, folder=tmp_path / "cache", command=["/nowhere/python"], limits=LIMITS)
    assert "the next process tries what was not tried" in str(found)
    again = qualify(CARD, PLAN, folder=tmp_path / "cache", command=fake(), limits=LIMITS)
    assert starts() == 0 and again.left_out("attention") == found.left_out("attention")


def test_a_model_of_another_shape_is_asked_for_its_own_alone(ask, starts, tmp_path):
    ask()
    own = dataclasses.replace(PLAN, asks={"attention": dataclasses.replace(PLAN.asks["attention"], shapes={"head_dim": 96})})
    found = ask(plan=own, bent="wrong")  # which is known to pass on other shapes
    assert starts() == 2 and [v.result for v in found.verdicts] == [PASSED, PASSED]
    assert set(Store(tmp_path / "cache", CARD).read().verdicts) == {"attention bent", "attention bent head_dim=96"}


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
    store = Store(tmp_path, CARD)
    assert store.write(Record({}, "2026-01-01", 1.0))
    before = store.path.read_text()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fail)
    assert not store.write(Record({}, "2026-01-02", 2.0))
    assert store.path.read_text() == before and [path.name for path in tmp_path.iterdir()] == [store.path.name]


@pytest.mark.slow
def test_of_two_that_start_at_once_the_second_waits_for_the_first(tmp_path, starts, fake):
    code = """
import json, sys
from jaxserve.qualification.qualify import qualify
from tests.qualification import rows
from tests.qualification.conftest import CARD, LIMITS, PLAN
from pathlib import Path
rows.install()
print(qualify(CARD, PLAN, folder=Path(sys.argv[1]), command=json.loads(sys.argv[2]), limits=LIMITS).left_out("attention"))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), json.dumps(fake(slow=1, bent="wrong"))]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert said[0] == said[1] == "{'bent': 'wrong values: wrong of a fake'}\n" and starts() == 1


def test_a_lock_that_is_never_given_up_is_not_waited_for_for_ever(tmp_path):
    store = Store(tmp_path, CARD)
    with store.lock(1.0) as first:
        start = time.monotonic()
        with store.lock(0.2) as second:
            assert first and not second and time.monotonic() - start < 5
    with store.lock(0.2) as free:
        assert free
