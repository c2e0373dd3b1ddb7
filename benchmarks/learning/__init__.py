"""What models of single mechanisms and of hybrids learn, at equal parameters."""
