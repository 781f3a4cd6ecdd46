"""Speculation: tokens are drafted cheaply, and several of them verified in one step of the model."""
