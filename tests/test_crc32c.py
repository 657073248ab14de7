"""The vectorised checksum is TensorBoard's own."""

import random

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as by_tensorboard

from lightning_cudagraph.timing.crc32c import masked_crc32c


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 255, 1023, 1024, 1025, 3000, 10_000])
def test_same_as_tensorboard(length: int) -> None:
    generator = random.Random(length)
    for _ in range(3):
        data = generator.randbytes(length)
        assert masked_crc32c(data) == by_tensorboard(data)


def test_a_known_value() -> None:
    # The check value of CRC-32C, from the catalogue of parametrised CRC algorithms: 0xE3069283.
    crc = 0xE3069283
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc32c(b"123456789") == masked
