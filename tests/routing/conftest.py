"""The servers behind a router have the model of the serving tests."""

from tests.serving.conftest import folder, llm, server, shared, shared_llm

__all__ = ["folder", "llm", "server", "shared", "shared_llm"]
