"""CUDA graphs of segmented layers: planned, captured and replayed from outside the layers."""
