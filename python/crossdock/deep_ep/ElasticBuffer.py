"""Where ``from crossdock.deep_ep import ElasticBuffer`` comes to, to say what is there."""

from ._missing import ELASTIC_BUFFER

raise ImportError(ELASTIC_BUFFER)
