"""Algorithms as pure functions: advantages, losses as sums, shaping of rewards and masks."""
