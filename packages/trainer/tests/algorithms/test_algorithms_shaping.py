from __future__ import annotations

import pytest
import torch

from engine_api.errors import ConfigError
from engine_trainer.algorithms.shaping import informative, overlong_penalty


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([[1, 80], [85, 90], [99, 100]])
    result = overlong_penalty(lengths, max_length=100, buffer=20)
    torch.testing.assert_close(result, torch.tensor([[0, 0], [-0.25, -0.5], [-0.95, -1.0]]))


def test_overlong_penalty_has_a_factor_and_an_end():
    result = overlong_penalty(torch.tensor([100, 500]), max_length=100, buffer=50, factor=0.3)
    torch.testing.assert_close(result, torch.tensor([-0.3, -0.3]))


@pytest.mark.parametrize("buffer", [0, 101, -1])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ConfigError, match="overlong"):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


def test_informative_groups():
    rewards = torch.tensor([[1.0, 1, 1], [0, 0, 0], [1, 0, 1], [0.1, 0.1, 0.1]])
    assert informative(rewards).tolist() == [False, False, True, False]
