"""The engine's side of a weight sync."""
