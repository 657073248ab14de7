"""The processes of a run: votes, failures, replicas and shards. Knows nothing of Lightning."""
