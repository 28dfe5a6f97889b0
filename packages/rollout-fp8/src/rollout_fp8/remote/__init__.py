"""A rollout in a process of its own: its server and its client."""
