"""The claim that samples permit, and its reasons: pure functions without a clock or I/O."""

from harness.claim.derive import RUNS_MOST as RUNS_MOST
from harness.claim.derive import Claim as Claim
from harness.claim.derive import NoClaim as NoClaim
from harness.claim.derive import derive_claim as derive_claim
from harness.claim.derive import is_settled as is_settled
