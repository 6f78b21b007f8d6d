"""Proof report: the claims of fastmp, checked by computation on this machine, without a GPU.

A chapter is a module: its docstring is the argument, its `claims()` yields the findings.
"""
