"""Where there is no GPU, Triton's kernels run in its interpreter: that must be said before it is loaded."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
