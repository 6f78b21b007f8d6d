"""Programs that use fastmp, run from the root of a checkout."""
