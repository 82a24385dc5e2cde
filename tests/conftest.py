"""Without a GPU, Triton's kernels run in its interpreter: it is chosen before they are made."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
