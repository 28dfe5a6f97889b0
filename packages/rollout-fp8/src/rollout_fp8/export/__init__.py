"""Engine's side of a weight sync."""
