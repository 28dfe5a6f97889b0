"""Placement of engines and rollouts on processes and machines."""
