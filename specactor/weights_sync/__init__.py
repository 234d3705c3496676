"""New weights from the trainer's shards to every engine rank: engines pull them by a plan, or are sent them through
buckets of shared memory."""
