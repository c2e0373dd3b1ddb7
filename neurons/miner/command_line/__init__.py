"""The operator's commands: doctor, status, bench, release, abandon."""
