"""The checksum of TensorBoard's records, vectorised.

Every record of an event file ends with a CRC32C of its bytes. TensorBoard computes it byte by byte in
Python: over a hundred microseconds for the times of one step, and while its writer thread holds the
interpreter for that, the training loop waits. A CRC is linear over XOR, so the bytes of a record can
be looked up all at once, each in a table for its distance from the end, and the results XORed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["masked_crc32c"]

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_MASK_DELTA = 0xA282EAD8  # tensorflow/core/lib/hash/crc32c.h, Mask
_GROWTH = 1024


def _byte_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


class _Tables:
    """What a byte adds to the checksum, by its distance from the end; grown as records need it."""

    def __init__(self) -> None:
        self._of_last_byte = _byte_table()
        # Row d: the checksum of each byte followed by d zero bytes.
        self._rows = self._of_last_byte[None]
        # What is left of the initial value 0xFFFFFFFF after n bytes.
        self._initial = np.array([0xFFFFFFFF], dtype=np.uint32)

    def _after_a_zero_byte(self, crc: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        shifted: npt.NDArray[np.uint32] = crc >> np.uint32(8)
        last: npt.NDArray[np.uint32] = self._of_last_byte[crc & np.uint32(0xFF)]
        return shifted ^ last

    def grow(self, length: int) -> None:
        rows, initial = [self._rows[-1]], [self._initial[-1:]]
        for _ in range(length - len(self._rows) + _GROWTH):
            rows.append(self._after_a_zero_byte(rows[-1]))
            initial.append(self._after_a_zero_byte(initial[-1]))
        self._rows = np.concatenate([self._rows, np.stack(rows[1:])])
        self._initial = np.concatenate([self._initial, *initial[1:]])

    def crc32c(self, data: bytes) -> int:
        length = len(data)
        if length >= len(self._rows):
            self.grow(length)
        from_end = np.arange(length - 1, -1, -1)
        parts = self._rows[from_end, np.frombuffer(data, dtype=np.uint8)]
        crc = np.bitwise_xor.reduce(parts, initial=self._initial[length])
        return int(crc) ^ 0xFFFFFFFF


_TABLES = _Tables()


def masked_crc32c(data: bytes) -> int:
    """The checksum that TensorBoard's record format asks for.

    Args:
        data: the bytes of a record, or of its length.

    Returns:
        The CRC32C, rotated and shifted as the format has it, in 32 bits.
    """
    crc = _TABLES.crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
