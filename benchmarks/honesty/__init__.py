"""What the claim promises, simulated under the noise that was measured: data, and its page."""
