"""Plans of a parallel layout before a process starts: memory, traffic, FLOPs, time, graphs. No torch."""
