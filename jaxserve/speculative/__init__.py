"""Speculation: drafts of the tokens that follow, and the rules by which a step accepts them."""
