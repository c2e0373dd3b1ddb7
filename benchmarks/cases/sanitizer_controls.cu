// Kernels that test compute-sanitizer itself, for sanitizer.py: three faults that it must report,
// and a correct handshake in which it must report none.

extern "C" __constant__ int quasar_planted_launch[3] = {64, 0, sizeof(void*)};

// fault 0: a write out of bounds; 1: a race between threads in shared memory; 2: a read of
// uninitialised global memory
extern "C" __global__ void quasar_planted(float* x, int fault) {
  __shared__ float tile[64];
  tile[threadIdx.x] = threadIdx.x;
  if (fault != 1) __syncthreads();
  if (fault == 2) tile[threadIdx.x] = x[threadIdx.x];
  x[(fault == 0 ? 1 << 24 : 0) + threadIdx.x] = tile[(threadIdx.x + 32) % 64];
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  unsigned address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }"
      : "=r"(address)
      : "l"(pointer));
  return address;
}

__device__ __forceinline__ void init_barrier(const void* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void wait_barrier(const void* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred over;\nagain:\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}"
      :
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

extern "C" __constant__ int quasar_handshake_launch[3] = {64, 0, sizeof(void*)};

// The producer warp copies eight chunks of x [1056], 1024 numbers, one after another into the same
// buffer; the consumer warp reads them and writes sums behind them. As in the layer's kernels, one
// lane arrives at the barrier for the whole consumer warp, after __syncwarp.
extern "C" __global__ void quasar_handshake(float* x, int) {
  __shared__ __align__(16) float4 chunk[32];
  __shared__ unsigned long long filled, taken;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_barrier(&filled, 32);
    init_barrier(&taken, 1);
  }
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 8; ++i) {
    if (threadIdx.x < 32) {
      wait_barrier(&taken, (i & 1) ^ 1);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :
                   : "r"(shared_address(chunk + lane)), "l"(x + 128 * i + 4 * lane)
                   : "memory");
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                   :
                   : "r"(shared_address(&filled))
                   : "memory");
    } else {
      wait_barrier(&filled, i & 1);
      sum += chunk[(lane + 5) % 32].x;
      __syncwarp();
      if (lane == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                     :
                     : "r"(shared_address(&taken))
                     : "memory");
    }
  }
  if (threadIdx.x >= 32) x[1024 + lane] = sum;
}
