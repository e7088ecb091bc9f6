"""Set-up of DeepEP's tests: the path of helpers, for the tests in gpu/ too."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
