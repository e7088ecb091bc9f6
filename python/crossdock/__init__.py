"""Expert parallelism between ranks."""
