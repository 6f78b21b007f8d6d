"""Explain why segments of a model cannot be captured, line by line: `fastmp.cuda_graphs.explain`."""
