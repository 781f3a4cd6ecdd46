"""An engine on the dummy model."""

import pytest

from jaxserve import Engine
from tests.dummy import ONE_BUCKET, dummy_model, make_engine


@pytest.fixture
def engine() -> Engine:
    return make_engine(dummy_model(), bucket_plan=ONE_BUCKET)


@pytest.fixture
def closed():
    """A list of engines that are closed at the end, their threads with them."""
    engines = []
    yield engines
    for engine in engines:
        engine.close()
