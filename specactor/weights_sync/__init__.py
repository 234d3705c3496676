"""New weights from the trainer's shards to every engine rank.

`sender` streams Hugging Face tensors through two buckets of shared memory; `receiver` runs in every engine rank,
checks, loads and reads back; `buckets` decides what goes where; `memory` is how a bucket is shared.
"""
