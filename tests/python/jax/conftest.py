"""Four devices in one process: parts of the CPU, or GPUs for the GPUs' tests."""

from __future__ import annotations

import os

import pytest

from xla_flags import QUICK_TO_COMPILE


def pytest_configure(config: pytest.Config) -> None:
    # Read when JAX looks for devices, which is later.
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {QUICK_TO_COMPILE}"


@pytest.fixture
def world():
    """All ranks, as the devices of this process."""
    import jax  # when JAX knows its devices

    from jax_support import World

    made = World()
    yield made
    made.ep.close()
    jax.clear_caches()
