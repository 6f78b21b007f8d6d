"""Common core of all ops: registry, autograd formulas, launcher, argument checks, row-wise tiles."""
