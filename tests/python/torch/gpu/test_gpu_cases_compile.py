"""Expert parallelism under torch.compile, as on the CPU: see gpu_cases.py."""

from __future__ import annotations

from gpu_cases import cases_of, compiled, run_case

globals().update(cases_of("compile"))


def test_a_mistake_inside_compiled_code_is_named() -> None:
    run_case(1, compiled.test_mistakes_inside_compiled_code_reach_the_peers)
