// What a test calls instead of a launch: one of WKV6's kernels over its whole grid.

extern "C" void run(const quasar::wkv6::Arguments& arg, bool backward, int x, int y) {
  using namespace quasar::wkv6;
  gridDim = {x, y};
  for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
      if (backward) run_block(gradients::THREADS, [&] { gradients::wkv6_backward(arg); });
      else run_block(THREADS, [&] { wkv6_forward(arg); });
}
