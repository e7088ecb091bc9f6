"""Groups with logical experts, and experts that move, as on the CPU: see gpu_cases.py."""

from __future__ import annotations

from gpu_cases import cases_of

globals().update(cases_of("placement"))
