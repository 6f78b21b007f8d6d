"""Common core of all ops: registry, autograd formulas, launcher, argument checks, rows cut into tiles."""
