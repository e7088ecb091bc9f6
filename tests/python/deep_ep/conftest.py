"""Lets the tests in gpu/ import the cases."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
