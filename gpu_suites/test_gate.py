from __future__ import annotations

from rollproof.engines.gpus import GpuFindings, device_files


def test_the_driver_and_the_device_files_agree(rollproof_gpus: GpuFindings) -> None:
    """Every GPU that the gate found has a device file, and plausible data from the driver."""
    assert rollproof_gpus.gpus
    assert len(device_files()) >= len(rollproof_gpus.gpus)
    for gpu in rollproof_gpus.gpus:
        assert gpu.name != ""
        assert gpu.memory is None or gpu.memory > 2**30
