"""The CPU's tests on GPUs: all that are not left out below, as they stand, with their parameters.

Torch's default device says where a test computes: in each rank's process its own GPU, in this one
the first. A test of four ranks runs with as many as there are GPUs: 4, 2 or 1. Files beside this
one take the tests of some modules each, no more than run in two minutes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import support
import test_moe_decode as moe_decode
import test_moe_layer as moe_layer
import test_moe_mixed_precision as mixed
import test_moe_overlap as moe_overlap
import test_torch_compile as compiled
import test_torch_pool as pool
import test_torch_tools as tools
import test_torch_wire as wire
import test_training_alike as training_alike
from torch_ranks import computing_on, gpu_ranks, run_on_gpus

# Modules of tests by their subjects.
MODULES = {
    name.removeprefix("torch_"): importlib.import_module(f"test_{name}")
    for name in (
        *("torch_ops", "torch_direct", "torch_plans", "torch_fp8", "torch_pool", "torch_errors"),
        *("torch_opcheck", "torch_low_latency", "torch_tools", "torch_compile", "torch_wire"),
        "torch_placement",
        *("moe_grouped", "moe_grouped_scaled", "moe_layer", "moe_decode", "moe_overlap"),
        *("moe_wire", "moe_mixed_precision", "training_alike"),
        *("tp_ops", "tp_errors", "tp_layers", "tp_fp8", "tp_dtensor", "tp_training"),
        *("tp_compile", "tp_async"),
    )
}

LEFT_OUT = {
    # Numbers alone.
    pool.test_blocks_hold_what_was_asked,
    # It tests bounds of the CPU's memory; a GPU's grows by pages of 2 MiB.
    pool.test_room_for_more_groups_than_growths,
    # Where one rank's call raises, its peers on GPUs go on to the operations that follow, which
    # that rank does not call. The rank's own errors are tested below, and its peers' errors of a
    # single operation are among the errors.
    moe_layer.test_a_bad_input_is_named_and_the_peers_hear_of_it,
    # It counts the CPU's operators.
    moe_decode.test_a_step_needs_few_operators,
    # Peers on GPUs hear of a mistake in a single operation later.
    wire.test_peers_are_told_of_a_wire_that_does_not_exist,
    # Ranks of GPUs that make different calls wait until the timeout.
    moe_decode.test_ranks_of_which_one_decodes_are_out_of_step,
    compiled.test_mistakes_inside_compiled_code_reach_the_peers,
    # Not all GPUs have the kernel; test_gpu_moe.py tests it.
    mixed.test_fp8_experts_have_wide_parameters,
}

# Of these modules' tests.
FIXTURES = ("alone", "comm", "dispatched", "inputs", "prepared")

# Cases of any number of ranks but one.
ABOUT_PEERS = (
    moe_layer.test_gradients_are_averaged_and_those_of_experts_scaled,
    moe_overlap.test_a_replicated_layer_has_the_bits_of_the_serial_one,
    mixed.test_recipes_have_gradients_of_one_process,
    mixed.test_an_overflow_of_one_ranks_experts_is_one_of_all,
    training_alike.test_experts_of_two_communicators_are_scaled_by_their_own_ranks,
    training_alike.test_a_parameter_that_one_rank_has_frozen_is_told_on_all,
    training_alike.test_the_mistake_of_one_rank_is_told_on_all,
    *(case for name, case in vars(tools).items() if name.startswith(("check_", "test_"))),
)

GPUS = gpu_ranks()[-1]


def run_case(
    num_ranks: int, case: Callable[..., Any], *args: Any, timeout: float = 60, **options: bool
) -> Any:
    """`run_ranks` with a GPU for each rank."""
    if GPUS == 1 and (num_ranks == 2 or case in ABOUT_PEERS):
        pytest.skip("needs two GPUs")
    ranks = min(num_ranks, GPUS)
    return run_on_gpus(ranks, case, *args, timeout=timeout + 60, **options)


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch_ranks keeps the one that starts the ranks.
    for module in (support, *MODULES.values()):
        monkeypatch.setattr(module, "run_ranks", run_case, raising=False)
    with computing_on(0):
        yield


def cases_of(*subjects: str) -> dict[str, Any]:
    """The names of a file that runs the tests of these modules: tests, and their fixtures."""
    found: dict[str, Any] = {"on_gpus": on_gpus, "pytestmark": pytest.mark.gpu}
    for subject in subjects:
        for name, item in vars(MODULES[subject]).items():
            if name in FIXTURES:
                found[name] = item
            elif name.startswith("test_") and item not in LEFT_OUT:
                found[name.replace("test_", f"test_{subject}_", 1)] = item
    return found
