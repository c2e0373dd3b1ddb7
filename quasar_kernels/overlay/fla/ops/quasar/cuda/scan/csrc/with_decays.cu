// The forward passes with decays, for tools that compile each .cu file separately; at run time
// NVRTC compiles the same sources with the same definitions.

#define QUASAR_DECAY 1

#include "segment_map.cu"
#include "segment_output.cu"

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
