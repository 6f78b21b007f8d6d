"""Benchmarks beside peers and floors; docs/benchmarks.md lists the commands."""
