"""The described GPUs that programs are compiled for."""

import jax
import pytest
from for_h200 import h200_devices


@pytest.fixture(scope="session")
def h200s():
    return h200_devices()


@pytest.fixture(scope="session")
def h200(h200s):
    return jax.sharding.SingleDeviceSharding(h200s[0])
