"""Set-up of the engines' tests: the path of helpers."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
