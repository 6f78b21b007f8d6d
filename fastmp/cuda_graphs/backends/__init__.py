"""Backends of capture and replay: CUDA graphs on a GPU, recorded programs on a CPU."""
