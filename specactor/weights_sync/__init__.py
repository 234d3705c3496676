"""New weights from the trainer's shards to every engine rank.

`sender` has engines pull them by the plan of `plan` and `pulls`, or streams Hugging Face tensors through two buckets of
shared memory; `receiver` runs in every engine rank, copies and digests, or checks, loads and reads back; `buckets`
decides what goes where; `memory` is how memory is shared, `mirrors` what of it other hosts see.
"""
