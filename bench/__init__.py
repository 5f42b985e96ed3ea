"""`make bench`: what Quiesce reaches on this machine, beside plain transformers and the machine's own limits."""
