"""Which request gets how many tokens in each step, and which pages hold its KV. No JAX here."""
