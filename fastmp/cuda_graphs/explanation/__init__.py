"""Finds what a graph could not hold in a model, with the line that does it: `fastmp.cuda_graphs.explain`."""
