"""A training step of a rank as one list of instructions, planned from schedule, segments and graph scope."""
