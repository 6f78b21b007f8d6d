"""What captures and replays: CUDA graphs on a GPU, recorded programs on a CPU."""
