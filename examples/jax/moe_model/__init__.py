"""A byte-level mixture-of-experts language model in JAX, on a mesh of data times experts."""
