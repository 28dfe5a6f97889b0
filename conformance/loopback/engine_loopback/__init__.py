"""Small engine in plain torch that follows the contract, for tests of the conformance suite."""
