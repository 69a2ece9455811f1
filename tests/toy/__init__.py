"""A stage program without torch: what the chain is tested with.

`program` computes, `runner` runs it inside an in-memory cluster, `interpreter` makes an executable
that stands in for a stage's `python`.
"""
