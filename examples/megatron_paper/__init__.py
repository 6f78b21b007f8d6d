"""Reproduction of the Megatron-LM paper, Shoeybi et al. 2019 (arXiv 1909.08053)."""
