"""The operator alone, beside flash-linear-attention's delta rule."""
