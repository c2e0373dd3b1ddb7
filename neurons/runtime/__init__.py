"""What every process needs: settings, logs, lock, signals, children, git, identity, errors."""
