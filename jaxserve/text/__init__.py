"""Tokenizers, chat templates and detokenisation."""
