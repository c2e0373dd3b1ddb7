"""`python -m harness.worker TASK`: read a job from stdin, do it, reply on a private descriptor.

Only data on that descriptor count; stdout and stderr belong to the code under test. That code runs
in a separate process, which this one starts before it reads the job.
"""

from __future__ import annotations

import contextlib
import os
import sys

with contextlib.suppress(ValueError):  # untrusted code may write there, and more imports follow
    sys.path.remove(os.getcwd())

from pydantic import ValidationError

from harness.measuring.job import Exit, Job
from harness.measuring.process import die_with_parent
from harness.worker.tasks import WITH_SUBJECT, answer


def main() -> int:
    """Start the subject if the task has one, read the job from stdin, do it, send the reply."""
    die_with_parent()
    subject = None
    if sys.argv[1:] and sys.argv[1] in WITH_SUBJECT:
        from harness.worker.subject.serve import fork_subject

        subject = fork_subject()
    try:
        job = Job.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        sys.stderr.write(f"harness.worker takes a job on stdin: {error}\n")
        return Exit.BAD_JOB
    if os.getppid() != job.parent:
        return Exit.PARENT_GONE  # the parent ended before `die_with_parent`
    os.set_inheritable(job.result_fd, False)
    status = answer(job, subject)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips exit handlers: a crash during CUDA's teardown must not affect the result.
    if subject is not None:
        subject.end()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
