// WKV6 for heads of 128 channels, for tools that compile each .cu file separately; at run time
// NVRTC compiles the same sources with the same definitions.

#define WKV6_KEYS 128

#include "wkv6_backward.cu"
#include "wkv6_forward.cu"
