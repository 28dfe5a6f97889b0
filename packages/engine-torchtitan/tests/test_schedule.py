"""The layers of a pipeline's stages, and the order of their work."""

from __future__ import annotations

import pytest

from engine_torchtitan.pipeline import find_stage, list_layers, list_work


@pytest.mark.parametrize(("stages", "layers"), [(1, 1), (2, 3), (3, 7), (4, 4), (5, 32)])
def test_stages_hold_each_layer_once_and_in_order(stages: int, layers: int) -> None:
    held = [list_layers(stage, stages, layers) for stage in range(stages)]
    assert [layer for one in held for layer in one] == list(range(layers))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for stage, own in enumerate(held):
        for layer in own:
            assert find_stage(f"layers.{layer}.attention.wo.weight", stages, layers) == stage
    assert find_stage("tok_embeddings.weight", stages, layers) == 0
    assert find_stage("norm.weight", stages, layers) == stages - 1


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_the_schedule_ends_and_bounds_the_micro_batches_in_flight(stages: int, count: int) -> None:
    work = [list(list_work(stage, stages, count)) for stage in range(stages)]
    done: set[tuple[int, str, int]] = set()
    while any(work):
        before = len(done)
        for stage in range(stages):
            # A stage waits for what its neighbours send.
            while work[stage]:
                kind, index = work[stage][0]
                needs = {
                    "forward": (stage - 1, "forward", index),
                    "backward": (stage + 1, "backward", index),
                }[kind]
                if 0 <= needs[0] < stages and needs not in done:
                    break
                done.add((stage, kind, index))
                del work[stage][0]
            flying = [one for one in done if one[:2] == (stage, "forward")]
            ended = [one for one in done if one[:2] == (stage, "backward")]
            assert len(flying) - len(ended) <= stages - stage
        assert len(done) > before, "the stages wait for each other"
    assert len(done) == 2 * stages * count
