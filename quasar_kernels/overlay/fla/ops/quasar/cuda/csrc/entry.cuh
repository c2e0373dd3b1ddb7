// Macros that define a kernel's entry points and the launch data that the host reads.

#pragma once

#define QUASAR_ENTRY(DTYPE, NAME, ATTRIBUTES, PARAMETERS, ARGUMENTS)         \
  extern "C" __global__ void ATTRIBUTES quasar_##NAME##_##DTYPE PARAMETERS { \
    NAME<Scalar::DTYPE> ARGUMENTS;                                           \
  }

// Defines quasar_NAME_bf16 and quasar_NAME_fp16 from NAME<T>; a program at run time has one of
// them.
#if defined(QUASAR_ONLY_BF16)
#define QUASAR_KERNEL(...) QUASAR_ENTRY(bf16, __VA_ARGS__)
#elif defined(QUASAR_ONLY_FP16)
#define QUASAR_KERNEL(...) QUASAR_ENTRY(fp16, __VA_ARGS__)
#else
#define QUASAR_KERNEL(...) QUASAR_ENTRY(bf16, __VA_ARGS__) QUASAR_ENTRY(fp16, __VA_ARGS__)
#endif

// Launch data: threads and bytes of dynamic shared memory of a block, and the size of the argument
// structure, which the host compares with its own.
#define QUASAR_LAUNCH(NAME, THREADS, SHARED, ARGUMENTS) \
  extern "C" __constant__ int quasar_##NAME##_launch[3] = {THREADS, SHARED, sizeof(ARGUMENTS)};

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
