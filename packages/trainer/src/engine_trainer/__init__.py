"""SFT and RL over any engine of the contract, by name."""
