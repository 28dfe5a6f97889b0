"""The RL loop: experience in, updates of the policy and the critic out."""
