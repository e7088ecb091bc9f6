"""The order of streams in contexts of CUDA, with a stand-in for the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Contexts are numbers: 1 is the primary of device 0, 2 another of that device, 3 one of device 1,
# and 0 none. Stream 7 is the primary's. An event has the number of its context.
DRIVER = r"""
#include <stdio.h>
static long stack[8];
static int top;
void make_current(long context) { stack[0] = context; }
long depth(void) { return top; }
static long of(long stream) { return stream == 0 ? stack[top] : 1; }
int cuDevicePrimaryCtxRetain(long* out, int device) { *out = device == 0 ? 1 : 3; return 0; }
int cuCtxGetCurrent(long* out) { *out = stack[top]; return 0; }
int cuCtxGetDevice(int* out) { *out = stack[top] == 3; return 0; }
int cuCtxPushCurrent_v2(long context) { stack[++top] = context; return 0; }
int cuCtxPopCurrent_v2(long* out) { *out = stack[top--]; return 0; }
int cuEventCreate(long* out, unsigned flags) { *out = stack[top]; return 0; }
int cuEventDestroy_v2(long event) { return 0; }
int cuEventRecord(long event, long stream) {
  printf("record %ld of %ld, ", stream, of(stream));
  return event == of(stream) ? 0 : 400;
}
int cuStreamWaitEvent(long stream, long event, unsigned flags) {
  printf("%ld of %ld waits for %ld\n", stream, of(stream), event);
  fflush(stdout);
  return 0;
}
"""

CALL = """
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
from crossdock import _core
current, first, second = map(int, sys.argv[2:])
driver.make_current(ctypes.c_long(current))
_core.order_streams(0, first, second)
assert driver.depth() == 0
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", made]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    return made


@pytest.mark.parametrize("current, own", [(0, 1), (1, 1), (2, 2), (3, 1)])
def test_stream_0_is_that_of_the_devices_current_context(
    driver: Path, current: int, own: int
) -> None:
    for first, second in ((0, 7), (7, 0), (7, 7)):
        command = [sys.executable, "-c", CALL, driver, *map(str, (current, first, second))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        begin, end = (1 if stream else own for stream in (first, second))
        wants = f"record {first} of {begin}, {second} of {end} waits for {begin}\n"
        assert done.stdout == wants
