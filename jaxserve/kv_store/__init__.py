"""Where the KV of full pages is kept beyond the pool: host memory, a folder, or one over the other. No JAX here."""
