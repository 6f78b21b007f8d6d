"""`pytest benchmarks/ --benchmark-only`, `python -m benchmarks.cpu_goals` and `... benchmarks.gpu_check`."""
