"""The commands that talk to a server find the model of the serving tests."""

from tests.serving.conftest import folder, llm, server, shared, shared_llm

__all__ = ["folder", "llm", "server", "shared", "shared_llm"]
