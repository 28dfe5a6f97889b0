"""Tests of the simulated device, in a process of its own, which the device changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import torch
from engine_conformance import stand_in
stand_in.install()
stand_in.install()
"""

CASES = {
    "tensors are on the device": """
x = torch.arange(6.0, device="npu").view(2, 3)
assert x.device.type == "npu" and x.is_contiguous() and x[1].tolist() == [3.0, 4.0, 5.0]
assert x.cpu().device.type == "cpu" and torch.equal(x.cpu().to("npu").cpu(), x.cpu())
assert float(x.sum()) == 15.0
""",
    "a copy leaves the device in inference mode, too": """
with torch.inference_mode():
    x = torch.ones(2, device="npu")
    assert x.cpu().device.type == "cpu" and type(x.cpu()) is torch.Tensor
    assert x.double().device.type == "npu"
""",
    "devices do not mix": """
try:
    torch.ones(2, device="npu") + torch.ones(2)
except RuntimeError:
    pass
else:
    print("mixed")
""",
    "a step is the CPU's": """
torch.manual_seed(0)
here = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
there = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
there.load_state_dict(here.state_dict())
there.to("npu")
assert all(p.device.type == "npu" for p in there.parameters())
x = torch.randn(5, 8)
for model, data in ((here, x), (there, x.to("npu"))):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
for a, b in zip(here.parameters(), there.parameters()):
    assert torch.equal(a, b.cpu())
there.to("cpu")
assert all(p.device.type == "cpu" and type(p) is torch.nn.Parameter for p in there.parameters())
""",
    "in place is in place": """
x = torch.zeros(4, device="npu")
view = x[1:3]
assert view.add_(2) is view
assert x.tolist() == [0, 2, 2, 0]
x.copy_(torch.arange(4.0))
assert view.tolist() == [1, 2]
storage = x.untyped_storage()
storage.resize_(0)
assert x.untyped_storage().size() == 0
""",
    "sizes follow the values": """
made = (
    torch.arange(4, device="npu"),
    torch.eye(2, device="npu"),
    torch.ones(3, device="npu").unsqueeze_(0),
)
assert [tuple(x.shape) for x in made] == [(4,), (2, 2), (1, 3)]
assert all(x.shape == x.cpu().shape and x.stride() == x.cpu().stride() for x in made)
weight = torch.nn.Parameter(torch.ones(3, device="npu"))
weight.data = torch.zeros(5, device="npu")
assert weight.shape == (5,) and weight.tolist() == [0.0] * 5 and type(weight.data) is type(made[0])
""",
    "generators are the CPU's": """
state = torch.npu.get_rng_state()
first = torch.rand(3)
torch.npu.set_rng_state(state)
assert torch.equal(torch.rand(3), first)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_carries(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + CASES[name]], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-3000:]
