"""A run and its folder: checkpoints, lock, interrupts, the reference model."""
