// The segmented scan for heads of 128 channels, for tools that compile every .cu file by itself;
// what a call needs is compiled from the same sources at run time.

#define QUASAR_HEAD 128

#include "segment_map.cu"
#include "segment_output.cu"
#include "segment_scan.cu"

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
