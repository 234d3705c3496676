"""New weights from the trainer's shards to every engine rank, by a plan or through buckets."""
