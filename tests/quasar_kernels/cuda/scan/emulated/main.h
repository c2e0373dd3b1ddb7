// Pass 1 and the scan on files of a folder: k, v, beta -> maps, offsets (R), states.

template <class X>
std::vector<X> read_file(const std::string& path) {
  FILE* file = fopen(path.c_str(), "rb");
  fseek(file, 0, SEEK_END);
  std::vector<X> out(ftell(file) / sizeof(X));
  rewind(file);
  if (fread(out.data(), sizeof(X), out.size(), file) != out.size()) abort();
  fclose(file);
  return out;
}

void write_file(const std::string& path, const std::vector<float>& x) {
  FILE* file = fopen(path.c_str(), "wb");
  fwrite(x.data(), sizeof(float), x.size(), file);
  fclose(file);
}

// folder, dtype, tokens, heads, segments, tokens of a segment
int main(int, char** words) {
  using namespace quasar;
  using namespace quasar::scan;
  const std::string folder = std::string(words[1]) + "/";
  const bool bf16 = std::string(words[2]) == "bf16";
  const i64 T = atol(words[3]);
  const int heads = atoi(words[4]), segments = atoi(words[5]);
  const auto k = read_file<u16>(folder + "k"), v = read_file<u16>(folder + "v");
  const auto beta = read_file<float>(folder + "beta");
  std::vector<float> maps((size_t)segments * heads * S * S, NAN), states(maps);
  Arguments arg = {};
  arg.k = k.data(), arg.v = v.data(), arg.beta = beta.data();
  arg.maps = maps.data(), arg.states = states.data();
  arg.T = T, arg.length = atol(words[6]), arg.per_sequence = segments, arg.heads = heads;
  for (i64* stride : {arg.k_stride, arg.v_stride})
    stride[0] = T * heads * S, stride[1] = heads * S, stride[2] = S;
  static TensorMaps none = {};
  gridDim = {segments * heads * PANELS, 1};
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    run_block(32 * MAP_WARPS, [&] {
      if (bf16) segment_map<Scalar::bf16>(arg, none);
      else segment_map<Scalar::fp16>(arg, none);
    });
  write_file(folder + "maps", maps);
  write_file(folder + "offsets", states);
  for (blockIdx.x = 0; blockIdx.x < heads; ++blockIdx.x)
    for (blockIdx.y = 0; blockIdx.y < S / COLUMNS; ++blockIdx.y)
      run_block(SCAN_THREADS, [&] { segment_scan(arg); });
  write_file(folder + "states", states);
}
