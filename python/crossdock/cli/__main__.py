"""``python -m crossdock.cli`` is the command ``crossdock``."""

import sys

from crossdock.cli import main

sys.exit(main())
