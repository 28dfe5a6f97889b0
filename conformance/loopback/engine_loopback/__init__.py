"""A small engine in plain torch that computes what the contract says; the conformance suite is tested with it."""
