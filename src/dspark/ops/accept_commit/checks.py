"""What the fused path of ``accept_commit`` needs: the window is held as that of ``accept`` is."""

from __future__ import annotations

from dspark import dispatch, faults
from dspark.ops.accept.checks import CHECKS

OP = dispatch.register("accept_commit", CHECKS)
VERIFY_LEN_FAULT = faults.declare(OP, "verify-len-out-of-range")
