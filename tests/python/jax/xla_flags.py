"""XLA's options for the tests of crossdock.jax."""

from __future__ import annotations

# Most of the time here goes into compiling, and little code need be fast. The documentation's
# programs, which the tests run as well, choose none of these.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
