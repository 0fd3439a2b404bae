// Runs a CTA or a cluster of a Hopper kernel: warps at random paces, copies and products at random times, all from one seed.

namespace host_cuda {

inline unsigned hopper_seed = 1;

inline void start_fibers() {
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    fiber.started = false;
    fiber.state = State::kReady;
    makecontext(&fiber.start, fiber_main, 0);
  }
}

struct Paces {  // chances in percent, drawn anew from time to time
  std::vector<int> warps;
  int loads, stores, products;

  void draw(std::mt19937& random) {
    for (int& pace : warps) pace = 3 + random() % 97;
    loads = 2 + random() % 98;
    stores = 2 + random() % 98;
    products = 5 + random() % 95;
  }
};

inline bool chance(int percent) { return static_cast<int>(mok::host_cta.random() % 100) < percent; }

inline void run_copies_and_products(const Paces& paces) {
  auto& loads = mok::host_cta.loads;
  for (size_t i = 0; i < loads.size();) {
    if (!chance(paces.loads)) {
      ++i;
      continue;
    }
    const mok::HostCopy copy = loads[i];
    loads.erase(loads.begin() + i);
    mok::host_load(copy);
  }
  auto& letters = mok::host_cta.letters;
  for (size_t i = 0; i < letters.size();) {
    if (!chance(paces.loads)) {
      ++i;
      continue;
    }
    const mok::HostLetter letter = letters[i];
    letters.erase(letters.begin() + i);
    mok::host_deliver(letter);
  }
  for (auto& [thread, groups] : mok::host_cta.store_groups) {
    if (groups.empty() || !chance(paces.stores)) continue;
    for (const auto& copy : groups.front()) mok::host_store(copy);
    groups.pop_front();
  }
  for (auto& [thread, queue] : mok::host_products) {
    while (!queue.empty() && (queue.front().columns == 0 || chance(paces.products))) {
      const mok::HostProduct product = queue.front();
      queue.pop_front();
      if (product.columns == 0) break;
      mok::host_multiply(thread, product);
    }
  }
}

inline std::string standstill() {
  std::string text = "nothing moves;";
  for (size_t i = 0; i < fibers.size(); i += 32)
    text += " warp " + std::to_string(i / 32) + " waits for barrier " + std::to_string(mok::host_cta.awaited[i]) + ";";
  for (const auto& [address, barrier] : mok::host_cta.barriers)
    text += " barrier " + std::to_string(address) + ": " + std::to_string(barrier.pending) + " of " +
            std::to_string(barrier.count) + " to arrive, " + std::to_string(barrier.bytes) + " bytes, phase " +
            std::to_string(barrier.phase) + ";";
  return text;
}

inline void hopper_run_block() {
  constexpr int kRoundsOfAPace = 300;
  constexpr mok::u64 kPatience = 300000;
  mok::host_cta = mok::HostCta{};
  mok::host_products.clear();
  mok::host_named_barriers.clear();
  mok::host_cta.random.seed(hopper_seed++);
  mok::host_cta.awaited.assign(fibers.size(), 0);
  start_fibers();
  Paces paces{std::vector<int>(fibers.size() / 32), 0, 0, 0};
  mok::u64 seen = 0, quiet = 0;
  for (mok::u64 round = 0;; ++round) {
    if (round % kRoundsOfAPace == 0) paces.draw(mok::host_cta.random);
    bool alive = false;
    for (size_t warp = 0; warp < paces.warps.size(); ++warp) {
      const bool runs = chance(paces.warps[warp]);
      for (size_t i = warp * 32; i < warp * 32 + 32; ++i) {
        if (runs && fibers[i].state == State::kReady) resume(i);
        current = kNobody;
        if (!mok::host_cta.mistake.empty()) return;
        alive = alive || fibers[i].state != State::kDone;
      }
      if (runs) release(warp * 32, warp * 32 + 32, State::kAtWarp);
    }
    if (!alive) return;
    for (size_t first = 0; first < fibers.size(); first += blockDim.x)
      release(first, first + blockDim.x, State::kAtBlock);
    run_copies_and_products(paces);
    if (!mok::host_cta.mistake.empty()) return;
    quiet = mok::host_cta.progress == seen ? quiet + 1 : 0;
    seen = mok::host_cta.progress;
    if (quiet > kPatience) {
      mok::host_cta.mistake = standstill();
      return;
    }
  }
}

}  // namespace host_cuda

extern "C" const char* hopper_mistake() { return mok::host_cta.mistake.c_str(); }

extern "C" void set_hopper_shared_bytes(unsigned bytes) { mok::host_shared_bytes = bytes; }

extern "C" void set_hopper_cluster(unsigned ctas) { host_cuda::cluster_size = ctas; }

extern "C" void set_hopper_seed(unsigned seed) { host_cuda::hopper_seed = seed; }
