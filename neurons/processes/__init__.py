"""What keeps a process alive and stoppable: lock, signals, waits, children; this machine."""
