"""Server and client of a rollout in its own process."""
