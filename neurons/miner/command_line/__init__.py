"""What an operator asks: doctor, status, bench, release, abandon."""
