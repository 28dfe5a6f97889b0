"""A module that changes the environment when it is imported, for `VariableOfItsModule`."""

import os

os.environ["ENGINE_MUTANTS_OWN_VARIABLE"] = "1"
