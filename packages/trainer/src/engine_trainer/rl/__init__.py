"""The RL loop, from experience to updates of the policy and the critic."""
