"""CRC32C checksums of TensorBoard's records, vectorised over many records.

Every record of an event file ends with a CRC32C of its bytes. TensorBoard computes it byte by byte in
Python: almost a millisecond for the times of a step with a hundred layers. The records of such steps
differ in few bytes, always at the same places. A CRC is linear over XOR: theirs is that of a template,
XORed with a contribution of each of these bytes, which a table holds for its distance from the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_MASK_DELTA = 0xA282EAD8  # tensorflow/core/lib/hash/crc32c.h, Mask


def _byte_table() -> NDArray[np.uint32]:
    """The remainder of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


_BYTES = _byte_table()
_BYTES_LIST: list[int] = _BYTES.tolist()


def _crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _BYTES_LIST[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc


def masked_crc32c(data: bytes) -> int:
    """The masked CRC32C of TensorBoard's record format (rotated and shifted), in 32 bits."""
    crc = _crc(data) ^ 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


class AlikeRows:
    """Checksums of rows of bytes that differ from a template only at places where it is zero."""

    def __init__(self, template: bytes, places: NDArray[np.intp]) -> None:
        self._template_crc = _crc(template)
        rows = {len(template) - 1 - place: row for row, place in enumerate(places.tolist())}
        table = np.empty((len(rows), 256), np.uint32)
        crcs = _BYTES  # of each byte, with more and more zero bytes behind it
        for distance in range(max(rows, default=-1) + 1):
            if (row := rows.get(distance)) is not None:
                table[row] = crcs
            crcs = _BYTES[crcs & 0xFF] ^ crcs >> 8
        self._table = table.ravel()
        self._begins = np.arange(len(places), dtype=np.intp) * 256

    def masked_crc32c(self, differing: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """The masked checksums of rows, shape ``(rows,)``, from their differing bytes."""
        parts = self._table.take(differing + self._begins)
        crcs = np.bitwise_xor.reduce(parts, axis=1) ^ np.uint32(self._template_crc ^ 0xFFFFFFFF)
        rotated: NDArray[np.uint32] = crcs >> np.uint32(15) | crcs << np.uint32(17)
        return rotated + np.uint32(_MASK_DELTA)
