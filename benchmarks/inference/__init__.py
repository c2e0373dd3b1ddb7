"""How fast the inference server decodes, beside transformers' own generate."""
