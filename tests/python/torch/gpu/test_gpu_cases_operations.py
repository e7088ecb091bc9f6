"""Operations of expert parallelism, as on the CPU: see gpu_cases.py."""

from __future__ import annotations

from gpu_cases import cases_of

globals().update(cases_of("ops", "direct", "plans", "fp8", "pool", "wire"))
