"""Which GPU a lane's tensors live on, and how the workers of one run share those of a machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.fixtures import lane, plugin
from conformance.fixtures.lane import Lane, LaneError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine that is said to have so many GPUs."""

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


def test_devices() -> None:
    assert [str(lane.device(one)) for one in Lane] == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(("asked", "count"), [("cuda", 1), ("cuda", 2), ("second-gpu", 2), ("interpret", 0)])
def test_a_lane_that_is_there(asked: str, count: int, gpus: Any) -> None:
    gpus(count)
    assert lane.resolve(asked) == asked


@pytest.mark.parametrize(
    ("asked", "count", "message"),
    [
        ("second-gpu", 1, "one CUDA device, need two"),
        ("second-gpu", 0, "no CUDA device"),
        ("cuda", 0, "no CUDA device"),
    ],
)
def test_a_lane_that_is_not_there(asked: str, count: int, message: str, gpus: Any) -> None:
    gpus(count)
    with pytest.raises(LaneError, match=f"--lane={asked}: .*{message}"):
        lane.resolve(asked)


def test_the_second_gpu_is_never_chosen_unasked(gpus: Any) -> None:
    gpus(2)
    assert lane.resolve("auto") is Lane.CUDA


@pytest.mark.parametrize(
    ("worker", "count", "visible", "chosen"),
    [
        ("gw0", 2, None, "0"),
        ("gw1", 2, None, "1"),
        ("gw5", 2, None, "1"),
        ("gw7", 4, None, "3"),
        ("gw2", 2, "4,6", "4"),
        ("gw1", 2, "4, 6", "6"),
        ("gw1", 2, "GPU-a,GPU-b", "GPU-b"),
        ("gw3", 2, "1,0,7", "0"),  # torch counts two: the third name is none
        ("gw3", 1, None, None),
        ("gw3", 1, "5", None),
        ("gw3", 0, None, None),
        ("", 0, None, None),
    ],
)
def test_workers_go_round_the_gpus(worker: str, count: int, visible: str | None, chosen: str | None) -> None:
    assert lane.visible_gpu(worker, count, visible) == chosen


def test_a_worker_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    lane.spread("gw3", 2)
    assert lane.os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaneError, match="worker gw1: CUDA was initialised"):
        lane.spread("gw1", 2)
    lane.spread("", 0)
    assert lane.os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(("this", "told"), [(Lane.CUDA, 3), (Lane.SECOND, 0), (Lane.INTERPRET, 0)])
def test_the_controller_tells_its_workers(this: Lane, told: int, gpus: Any) -> None:
    gpus(3)
    node = SimpleNamespace(config=SimpleNamespace(stash={plugin.LANE: this}), workerinput={})
    plugin.pytest_configure_node(node)
    assert node.workerinput == {plugin.GPUS_KEY: told}
