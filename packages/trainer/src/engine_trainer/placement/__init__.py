"""Engines and rollouts where they run: one process, torchrun or Ray."""
