// WKV6 for operands in fp32, for tools that compile every .cu file by itself; what a call needs is
// compiled from the same sources at run time.

#define WKV6_FP32 1

#include "wkv6_backward.cu"
#include "wkv6_forward.cu"
