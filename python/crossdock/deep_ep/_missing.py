"""The error texts for parts of DeepEP that are not there."""

ELASTIC_BUFFER = (
    "crossdock.deep_ep has no ElasticBuffer (DeepEP 2) yet: it has DeepEP 1.2's Buffer, whose "
    "dispatch and combine serve the same ranks and batches"
)
