"""Layers of experts, and tools of training, as on the CPU: see gpu_cases.py."""

from __future__ import annotations

from gpu_cases import cases_of, moe_layer, run_case

import test_moe_router as moe_router

globals().update(
    cases_of(
        *("moe_grouped", "moe_grouped_scaled", "moe_layer", "moe_decode", "moe_wire", "tools"),
        "training_alike",
    )
)


def test_a_bad_input_of_a_layer_is_named() -> None:
    run_case(1, moe_layer.test_a_bad_input_is_named_and_the_peers_hear_of_it)


def test_a_bias_evens_out_the_load_alike_on_all_ranks() -> None:
    run_case(2, moe_router.test_a_bias_evens_out_the_load_alike_on_all_ranks)
