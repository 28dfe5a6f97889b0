"""Algorithms as pure functions, which are advantages, losses as sums, and shaping."""
