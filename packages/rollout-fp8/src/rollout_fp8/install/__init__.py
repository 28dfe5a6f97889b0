"""The server's side of a weight sync."""
