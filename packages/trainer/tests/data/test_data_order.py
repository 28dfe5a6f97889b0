from __future__ import annotations

from engine_trainer.data import SampleOrder


def test_every_epoch_holds_every_sample_once_in_its_own_order():
    order = SampleOrder(10, seed=1)
    first, second = order.take(0, 10), order.take(10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == SampleOrder(10, seed=1).take(0, 10)
    assert first != SampleOrder(10, seed=2).take(0, 10)


def test_a_position_gives_the_same_samples_whatever_came_before():
    whole = SampleOrder(7, seed=3).take(0, 50)
    assert SampleOrder(7, seed=3).take(23, 10) == whole[23:33]
    backwards = SampleOrder(7, seed=3)
    assert [backwards[p] for p in reversed(range(50))] == whole[::-1]


def test_without_shuffling_the_file_order_stays():
    assert SampleOrder(3, seed=0, shuffle=False).take(1, 4) == [1, 2, 0, 1]


def test_the_order_is_the_same_on_every_machine_and_release():
    assert SampleOrder(8, seed=0).take(0, 8) == [2, 3, 7, 1, 6, 5, 0, 4]
