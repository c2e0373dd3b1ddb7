"""What may be claimed of measurements, and why: pure functions, no clock and no I/O."""

from harness.claim.derive import RUNS_MOST as RUNS_MOST
from harness.claim.derive import Claim as Claim
from harness.claim.derive import NoClaim as NoClaim
from harness.claim.derive import derive_claim as derive_claim
from harness.claim.derive import is_settled as is_settled
