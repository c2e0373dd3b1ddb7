// The forward passes for heads of 128 channels, for tools that compile each .cu file separately; at
// run time NVRTC compiles the same sources with the same definitions.

#define QUASAR_HEAD 128

#include "segment_map.cu"
#include "segment_output.cu"
#include "segment_scan.cu"
#include "slice_maps.cu"

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
