"""crossdock.deep_ep by DeepEP's name: the import ends with that package in this one's place."""

import sys

from crossdock.deep_ep import install

for name in ("deep_ep", "deep_ep_cpp"):
    sys.modules.pop(name, None)
install()
