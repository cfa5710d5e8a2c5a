"""What the system's refusals mean, in a stable reason, and which of them blame the disk."""

from __future__ import annotations

import errno
import os

import pytest

from kvstrata.errors import Reason
from kvstrata.tiers.filesystem import storage_error


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Reason.STORE_FULL),
        ((errno.EROFS, errno.EACCES, errno.EPERM), Reason.STORE_READ_ONLY),
        ((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP), Reason.STORE_MISSING),
        ((errno.EIO, errno.ENXIO, errno.EBADF), Reason.STORE_IO),
    ],
)
def test_each_refusal_of_the_system_has_its_reason(numbers: tuple[int, ...], reason: Reason) -> None:
    for number in numbers:
        refusal = storage_error(OSError(number, os.strerror(number)), "opening the store /a/b")
        assert refusal.reason is reason, errno.errorcode[number]
        assert "opening the store /a/b" in refusal.cause
        assert os.strerror(number) in refusal.cause
        assert refusal.next_step
        assert ("disk failed" in refusal.cause) is (reason is Reason.STORE_IO)
