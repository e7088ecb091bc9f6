"""Paths for the tests' imports: runs.py beside them, and the example that they train."""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[2] / "examples" / "torch")]
