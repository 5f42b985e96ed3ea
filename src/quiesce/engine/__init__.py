"""The engine: tokens in, tokens out."""

import os

# oneDNN keeps a compiled kernel for every number of rows it has met: several MiB each, without these limits for ever.
# Set before torch is loaded; an operator's own values stand.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "64")
