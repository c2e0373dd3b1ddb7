// The passes of the segmented scan with decays, for tools that compile every .cu file by itself; what
// a call needs is compiled from the same sources at run time.

#define QUASAR_DECAY 1

#include "segment_map.cu"
#include "segment_output.cu"

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
