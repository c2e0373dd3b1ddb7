"""WKV6 in CUDA C++, token by token, for short calls and decoding."""
