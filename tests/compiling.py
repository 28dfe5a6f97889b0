"""Marks that tests of compiled blocks share."""

from __future__ import annotations

import pytest

# torch.compile asks every argument for its gradient, those that are no leaves too, and hides the
# warning by a ``warnings.showwarning`` of its own. Where warnings are errors, none is shown: it is
# raised before. A read of our own is an error still.
ignore_reads_of_compile = pytest.mark.filterwarnings(
    r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"
    r":torch\._(dynamo|subclasses)\."
)
