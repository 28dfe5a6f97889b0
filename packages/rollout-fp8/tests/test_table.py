"""Tables of addresses by which one launch reaches many tensors."""

from __future__ import annotations

import pytest
import torch

from rollout_fp8.kernels import table as tables
from rollout_fp8.kernels.table import AddressTable, addresses


def test_a_table_goes_to_the_device_again_only_when_a_tensor_has_moved() -> None:
    outs = [torch.zeros(2, 3) for _ in range(3)]
    sources = [torch.zeros(2, 3) for _ in range(3)]
    table = AddressTable(outs)
    assert table.update(sources)
    first = table.on_device
    assert not table.update(list(sources))
    assert table.on_device is first
    sources[1] = torch.zeros(2, 3)
    assert table.update(sources)
    assert table.on_device.tolist() == addresses((sources, outs)).tolist()
    assert first.tolist() != table.on_device.tolist()


def test_an_upload_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise MemoryError

    outs = [torch.zeros(2)]
    sources = [torch.zeros(2)]
    table = AddressTable(outs)
    table.update([torch.zeros(2)])
    with monkeypatch.context() as patch:
        patch.setattr(tables, "to_device", fail)
        with pytest.raises(MemoryError):
            table.update(sources)
    assert table.update(sources)
    assert table.on_device.tolist() == addresses((sources, outs)).tolist()
