"""Server's side of a weight sync."""
