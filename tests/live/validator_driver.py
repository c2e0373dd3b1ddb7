"""Runs the public validator's code without a chain: `PYTHON validator_driver.py FOLDER SECONDS`.

PYTHON is the public code's interpreter. The public `forward` calls
`evaluate_performance_submissions` and sleeps one to five minutes; here the pause is SECONDS. The
base class's `__init__` needs a chain, so the object is made without it.
"""

import sys
import time


def main(folder: str, seconds: float) -> None:
    """Judge the queue until the process is ended."""
    sys.path[0] = folder  # in place of this file's own folder
    from neurons import validator as public

    judge = object.__new__(public.Validator)
    judge.logit_verification_enabled = False
    judge.performance_validator = public.PerformanceValidator(validator_instance=judge)
    while True:
        judge.evaluate_performance_submissions()
        time.sleep(seconds)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
