"""Serving: an asynchronous engine (`AsyncLLM`) and an OpenAI-compatible HTTP server on it (`app.make_app`)."""
