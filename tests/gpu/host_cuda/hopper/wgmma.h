// Stands in for the wgmma instructions of cuda_src/tensor_core.cuh. Every thread evaluates its own outputs by tc_group,
// at a random time between issue and wait: operands that are overwritten too early show as wrong bits.

struct HostProduct {
  float* d;
  i32 columns;  // 0: a commit
  u64 a, b;     // descriptors: 18 bits of the address in shared memory
  bool add, a_is_mn, b_is_mn;
  const u32* fragments[4];  // not null: the first operand is in registers, those of the four lanes of a row
};

inline std::map<u32, std::deque<HostProduct>> host_products;  // by thread, in order

inline u16 host_operand(u32 thread, u64 descriptor, bool is_mn, i32 row, i32 k) {
  const u32 base = host_remote((descriptor & 0x3fff) << 4, thread / blockDim.x);
  const u32 at = is_mn ? base + row / 64 * 8192 + k * 128 + row % 64 * 2 : base + row * 128 + k * 2;
  return host_shared<u16>(host_swizzled(at, 128));
}

inline u16 host_fragment(const HostProduct& product, i32 r, i32 k) {
  const u32 word = product.fragments[k % 8 / 2][r + k / 8 * 2];
  return static_cast<u16>(word >> k % 2 * 16);
}

inline void host_multiply(u32 thread, const HostProduct& product) {
  const i32 row = thread % 128 / kWarpSize * 16 + thread % kWarpSize / 4, q = thread % 4;
  u32 a[2][kChainStep], b[kChainStep];
  for (i32 r = 0; r < 2; ++r)
    for (i32 k = 0; k < kChainStep; ++k)
      a[r][k] = operand_word(product.fragments[0] != nullptr
                                 ? host_fragment(product, r, k)
                                 : host_operand(thread, product.a, product.a_is_mn, row + 8 * r, k));
  for (i32 i = 0; i < product.columns / 8; ++i)
    for (i32 j = 0; j < 2; ++j) {
      for (i32 k = 0; k < kChainStep; ++k)
        b[k] = operand_word(host_operand(thread, product.b, product.b_is_mn, 8 * i + 2 * q + j, k));
      for (i32 r = 0; r < 2; ++r) {
        float& d = product.d[4 * i + 2 * r + j];
        d = tc_group(a[r], 1, b, 1, product.add ? d : 0.0f);
      }
    }
  ++host_cta.progress;
}

inline void wgmma_fence() {}
inline void wgmma_commit() { host_products[host_thread()].push_back(HostProduct{}); }

template <int kPending>
void wgmma_wait() {
  const auto& queue = host_products[host_thread()];
  const auto is_commit = [](const HostProduct& product) { return product.columns == 0; };
  while (std::count_if(queue.begin(), queue.end(), is_commit) > kPending) host_pause();
  __syncwarp();
}

template <Major kMajorA, Major kMajorB>
void wgmma_m64n256k16(float (&d)[128], u64 a, u64 b, i32 scale_d) {
  host_products[host_thread()].push_back(
      HostProduct{d, 256, a, b, scale_d != 0, kMajorA == Major::kMN, kMajorB == Major::kMN});
}

template <Major kMajorA, Major kMajorB>
void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, i32 scale_d) {
  host_products[host_thread()].push_back(
      HostProduct{d, 128, a, b, scale_d != 0, kMajorA == Major::kMN, kMajorB == Major::kMN});
}

// The first operand in registers: read, as a device does, at any time until the wait.
template <i32 kRows>
void wgmma_from_registers(float (&d)[64], const u32 (&a)[4], u64 b, i32 scale_d) {
  host_cuda::deposit(static_cast<const u32*>(a));
  HostProduct product{d, kRows, 0, b, scale_d != 0, false, false};
  for (u32 q = 0; q < 4; ++q)
    product.fragments[q] = host_cuda::collected<const u32*>(threadIdx.x % kWarpSize / 4 * 4 + q);
  __syncwarp();
  host_products[host_thread()].push_back(product);
}
