"""``engine-train replay``: a recorded step of RL made again, and compared with the recording."""
