"""Compiled code of every Triton kernel, for GPUs that need not be present, against expected facts."""
