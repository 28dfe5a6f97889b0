"""Functions that a configuration names: a user's own, a package's, and the built-in ones."""
