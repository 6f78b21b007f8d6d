"""Tools for developers of fastmp, run from a checkout: studies, the proof report, facts of compiled kernels,
interpreted kernels in random program order, graphs with empty replays.
"""
