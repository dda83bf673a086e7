"""Peaks of batch sizes without a device, against what a worker on the CPU says of the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac_search.errors import WorkloadNotFound
from sac_search.policy import checkpoint_layers
from sac_search.worker.client import WorkerClient
from sac_search.worker.scout import Scout
from sac_search.worker.session import SessionSettings

TRAIN = """
import torch
from torch import nn
from sac_search import Workload


def workload(device, batch_size=4):
    torch.manual_seed(0)
    if device.type != "cpu":
        raise RuntimeError("made for the CPU")
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    model = nn.Sequential(*layers)
    if batch_size > 1000:
        raise MemoryError("so many")
    batch = torch.randn(batch_size, 128, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, lambda model, x: model(x).square().mean(), batch, optimizer)


def without(device):
    return workload(device)
"""
LAYERS = ["0", "1", "2"]


@pytest.fixture
def settings(tmp_path: Path) -> SessionSettings:
    (tmp_path / "train.py").write_text(TRAIN)
    return SessionSettings(spec=str(tmp_path / "train.py"), device="cpu", forecast_device="A10")


def test_peaks_are_those_that_a_worker_forecasts_and_measures(
    settings: SessionSettings, tmp_path: Path
) -> None:
    full = checkpoint_layers(LAYERS)
    with Scout(settings, tmp_path / "forecast.log") as scout:
        peaks = {size: scout.full_peak_bytes(size) for size in (4, 64)}

    for size, peak_bytes in peaks.items():
        real = SessionSettings(spec=settings.spec, device="cpu", batch_size=size, steps=1)
        with WorkerClient(real, tmp_path / "worker.log") as client:
            client.describe()
            measurement = client.measure(full).measurement
        assert measurement is not None
        assert peak_bytes == pytest.approx(measurement.peak_bytes, rel=0.01)
    assert peaks[64] > 4 * peaks[4]  # type: ignore[operator]


def test_a_size_that_cannot_be_built_is_not_told(settings: SessionSettings, tmp_path: Path) -> None:
    with Scout(settings, tmp_path / "forecast.log") as scout:
        assert scout.full_peak_bytes(2000) is None
        assert scout.full_peak_bytes(4) is not None


def test_a_factory_without_batch_size_is_wrong_usage(
    settings: SessionSettings, tmp_path: Path
) -> None:
    without = SessionSettings(spec=f"{settings.spec}:without", device="cpu", forecast_device="A10")
    with (
        Scout(without, tmp_path / "forecast.log") as scout,
        pytest.raises(WorkloadNotFound, match="takes no batch_size"),
    ):
        scout.full_peak_bytes(4)
