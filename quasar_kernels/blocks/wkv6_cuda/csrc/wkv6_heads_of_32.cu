// WKV6 for heads of 32 channels, for tools that compile every .cu file by itself; what a call needs
// is compiled from the same sources at run time.

#define WKV6_KEYS 32

#include "wkv6_backward.cu"
#include "wkv6_forward.cu"
