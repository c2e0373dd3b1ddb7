// The threads of a block on a CPU: fibers, which synchronize at each operation of a warp or the block.

#pragma once

#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include "cuda.h"

constexpr int MOST_THREADS = 256, STACK_BYTES = 1 << 17;

struct Place { int x, y; };
static Place threadIdx, blockIdx, gridDim;

static const char* problem = nullptr;  // the error message of a faulty kernel

// ---- fibers ----

struct Fiber {
  char* stack;
  jmp_buf place;
  bool begun, over;
};
static Fiber fibers[MOST_THREADS];
static jmp_buf scheduler;
static void (*kernel)(const void*, const void*);
static const void* parameters[2];  // the addresses of its parameters
static int threads, running;
static long events;  // arrivals and ends; if their number does not change, there is a deadlock

static void yield() {
  if (!_setjmp(fibers[running].place)) _longjmp(scheduler, 1);
}

static void run_fiber() {
  kernel(parameters[0], parameters[1]);
  fibers[running].over = true;
  ++events;
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) static void resume(int thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = running = thread;
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  if (!fiber.stack) fiber.stack = (char*)malloc(STACK_BYTES);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = STACK_BYTES;
  makecontext(&context, run_fiber, 0);
  setcontext(&context);
}

// ---- barriers ----

// A barrier of threads, each with an argument of a common operation.
struct Barrier {
  int arrived = 0;
  long round = 0;
  void* things[MOST_THREADS];

  // the last of `size` threads to arrive calls act(all arguments)
  template <class Thing, class Act>
  void join(int size, int place, Thing& thing, const Act& act) {
    things[place] = &thing;
    const long own = round;
    ++events;
    if (++arrived < size) {
      while (round == own) yield();
      return;
    }
    arrived = 0;
    act((Thing**)things);
    ++round;
  }
};

static Barrier warps[MOST_THREADS / 32], block, barriers[16];

template <class Thing, class Act>
void with_warp(Thing& thing, const Act& act) {
  warps[running / 32].join(32, running % 32, thing, act);
}

static int __syncthreads_and(int x) {
  block.join(threads, running, x, [](int** all) {
    int both = 1;
    for (int i = 0; i < threads; ++i) both &= *all[i];
    for (int i = 0; i < threads; ++i) *all[i] = both;
  });
  return x;
}
static void __syncthreads() { __syncthreads_and(0); }
static void __syncwarp() {
  int nothing;
  with_warp(nothing, [](int**) {});
}

// bar.sync for `size` threads
static void join_barrier(int barrier, int size) {
  int nothing;
  barriers[barrier].join(size, barriers[barrier].arrived, nothing, [](int**) {});
}

template <class X>
X __shfl_sync(u32, X x, int from, int width = 32) {  // within groups of `width` adjacent lanes
  struct Thing { X x, out; int from; } thing{x, x, running % 32 / width * width + from % width};
  with_warp(thing, [](Thing** all) {
    for (int i = 0; i < 32; ++i) all[i]->out = all[all[i]->from & 31]->x;
  });
  return thing.out;
}
template <class X>
X __shfl_up_sync(u32 lanes, X x, int step) {
  return __shfl_sync(lanes, x, running % 32 < step ? running : running - step);
}
template <class X>
X __shfl_down_sync(u32 lanes, X x, int step) {
  return __shfl_sync(lanes, x, running % 32 + step < 32 ? running + step : running);
}
template <class X>
X __shfl_xor_sync(u32 lanes, X x, int other) {
  return __shfl_sync(lanes, x, running ^ other);
}
static u32 __reduce_max_sync(u32, u32 x) {
  with_warp(x, [](u32** all) {
    u32 most = 0;
    for (int i = 0; i < 32; ++i) most = max(most, *all[i]);
    for (int i = 0; i < 32; ++i) *all[i] = most;
  });
  return x;
}

// ---- blocks ----

// Runs the kernel in each thread of one block. Each warp runs until it waits for others, so that a
// missing barrier shows. The first warp runs first, or the last one if `backward`.
static void run_block(bool backward) {
  for (Fiber& fiber : fibers) fiber.begun = fiber.over = false;
  block.arrived = 0;
  for (Barrier& warp : warps) warp.arrived = 0;
  for (Barrier& barrier : barriers) barrier.arrived = 0;
  for (int left = threads; left > 0 && !problem;) {
    const long before = events;
    left = 0;
    for (int begin = 0; begin < threads; begin += 32) {
      int waiting;
      for (long seen = -1; seen != events;) {
        seen = events, waiting = 0;
        for (int i = begin; i < begin + 32; ++i) {
          const int thread = backward ? threads - 1 - i : i;
          if (fibers[thread].over) continue;
          resume(thread);
          waiting += !fibers[thread].over;
        }
      }
      left += waiting;
    }
    if (left && events == before) problem = "a deadlock: threads wait for threads that have ended or wait";
  }
}
