"""WKV6 in CUDA C++, one token after the other, for short calls and decoding."""
