"""Shared parts of all processes: settings, logs, lock, signals, children, git, identity, errors."""
