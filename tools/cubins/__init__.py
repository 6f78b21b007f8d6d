"""The code of every Triton kernel, compiled for GPUs that may be elsewhere, and what is expected of it."""
