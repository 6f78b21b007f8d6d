"""`python -m tools.prove`: what this library claims, shown by computations on the machine at hand, without a
GPU.

A chapter is a file whose docstring is its argument and whose `claims()` yields what was found.
"""
