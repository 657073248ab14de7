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


def _through(operator: NDArray[np.uint32], crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Apply a linear operator to checksums; it is a table of values for each of the four bytes."""
    first, second, third, fourth = operator
    low: NDArray[np.uint32] = first[crcs & 0xFF] ^ second[crcs >> 8 & 0xFF]
    low ^= third[crcs >> 16 & 0xFF]
    low ^= fourth[crcs >> 24]
    return low


def _after_zero_bytes(crcs: NDArray[np.uint32], counts: NDArray[np.intp]) -> NDArray[np.uint32]:
    """Each of `crcs` after the number of zero bytes in `counts`."""
    one = np.arange(256, dtype=np.uint32)
    operator = np.stack([_BYTES, one, one << np.uint32(8), one << np.uint32(16)])
    while counts.any():
        crcs = np.where(counts & 1, _through(operator, crcs), crcs)
        operator = _through(operator, operator)  # twice as many bytes
        counts = counts >> 1
    return crcs


class AlikeRows:
    """Checksums of rows of bytes that differ from a template only at places where it is zero."""

    def __init__(self, template: bytes, places: NDArray[np.intp]) -> None:
        self._template_crc = _crc(template)
        from_end = len(template) - 1 - places
        # The contribution of each bit at each place; that of a byte is the XOR of its bits'.
        bits = np.broadcast_to(_BYTES[1 << np.arange(8)], (len(places), 8))
        bits = _after_zero_bytes(bits, from_end[:, None])
        table = np.zeros((len(places), 256), np.uint32)
        for bit in range(8):
            table[:, 1 << bit : 2 << bit] = table[:, : 1 << bit] ^ bits[:, bit, None]
        self._table = table.ravel()
        self._begins = np.arange(len(places), dtype=np.intp) * 256

    def masked_crc32c(self, differing: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """The masked checksums of rows, shape ``(rows,)``, from their differing bytes."""
        parts = self._table.take(differing + self._begins)
        crcs = np.bitwise_xor.reduce(parts, axis=1) ^ np.uint32(self._template_crc ^ 0xFFFFFFFF)
        rotated: NDArray[np.uint32] = crcs >> np.uint32(15) | crcs << np.uint32(17)
        return rotated + np.uint32(_MASK_DELTA)
