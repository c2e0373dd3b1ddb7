"""What the validator does to one submission: sandbox, import check, timing, verdict."""
