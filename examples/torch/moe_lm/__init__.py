"""A byte-level mixture-of-experts language model, trained with its experts spread over ranks."""
