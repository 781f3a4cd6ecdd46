"""One LLM for all tests of this folder that don't make their own: its programs are compiled once."""

import pytest

from jaxserve import LLM
from tests import alphabet_model
from tests.llm.alphabet_llm import OPTIONS, POISON, assert_idle


@pytest.fixture(scope="session")
def load():
    """load(folder, **options): an LLM of the shapes that all tests here share; equal programs are compiled once."""
    return lambda folder, **options: LLM(folder, compilation_cache_dir="", **OPTIONS | options)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    tensors = alphabet_model.weights(poisoned=POISON)
    return alphabet_model.save(tmp_path_factory.mktemp("alphabet"), tensors=tensors)


@pytest.fixture(scope="session")
def shared(load, folder):
    return load(folder)


@pytest.fixture
def llm(shared):
    """The shared LLM, which a test must leave idle, with all pages free, and able to go on."""
    yield shared
    assert_idle(shared)
