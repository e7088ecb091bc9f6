"""Set-up of the torch tests: paths of helpers and of an example, and torch's compiler."""

import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[2] / "examples" / "torch")]

# Each rank compiles a little: processes that help it would start longer than that takes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
