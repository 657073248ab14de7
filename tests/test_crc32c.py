"""The checksums of many rows at once are TensorBoard's own."""

import random

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as by_tensorboard

from lightning_cudagraph.timing.sinks.tensorboard.crc32c import AlikeRows, masked_crc32c


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 255, 1024, 3000])
def test_same_as_tensorboard(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert masked_crc32c(data) == by_tensorboard(data)


@pytest.mark.parametrize(("length", "n_places"), [(1, 1), (9, 0), (300, 300), (5000, 700)])
def test_rows_that_differ_at_places(length: int, n_places: int) -> None:
    generator = np.random.default_rng(length)
    template = generator.integers(0, 256, length, np.uint8)
    places = generator.choice(length, n_places, replace=False)
    template[places] = 0
    differing = generator.integers(0, 256, (20, n_places), np.uint8)
    rows = np.tile(template, (20, 1))
    rows[:, places] = differing
    found = AlikeRows(template.tobytes(), places).masked_crc32c(differing)
    assert found.tolist() == [by_tensorboard(row.tobytes()) for row in rows]


def test_a_known_value() -> None:
    # The check value of CRC-32C, from the catalogue of parametrised CRC algorithms: 0xE3069283.
    crc = 0xE3069283
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc32c(b"123456789") == masked
