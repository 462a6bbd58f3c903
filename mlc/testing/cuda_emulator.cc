// How threads take turns; see cuda_emulator.h.
#include "cuda_emulator.h"

Index threadIdx, blockIdx;

namespace emulator {
constexpr size_t kStack = 64 * 1024;
alignas(1024) unsigned char shared_memory[kMostBlocks * kSharedBytes];
size_t static_shared;

std::vector<Fiber> fibers;
unsigned current;
size_t per_block;
static ucontext_t scheduler;
static const std::function<void()>* body;

unsigned rank_of(size_t fiber) { return unsigned(fiber / per_block); }
unsigned char* own_shared() { return shared_memory + rank_of(current) * kSharedBytes; }

void wait(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

static void start() {
  (*body)();
  wait(kDone);
}

void fail(const char* reason) {
  std::fprintf(stderr, "%s\n", reason);
  std::exit(3);
}

// Let the fibers in [from, to) go on if every live one of them waits for `state`; whether any did.
static bool release(size_t from, size_t to, State state) {
  bool any = false;
  for (size_t i = from; i < to; ++i) {
    if (fibers[i].state != kDone && fibers[i].state != state) return false;
    any |= fibers[i].state == state;
  }
  for (size_t i = from; i < to; ++i)
    if (fibers[i].state == state) fibers[i].state = kReady;
  return any;
}

// Run a warp until its threads wait for the block or are done.
static void run_warp(size_t from, size_t to, bool& forward) {
  do {
    for (size_t n = from; n < to; ++n) {
      current = forward ? n : to - 1 - (n - from);
      if (fibers[current].state != kReady) continue;
      threadIdx = fibers[current].index, blockIdx = fibers[current].block;
      swapcontext(&scheduler, &fibers[current].context);
    }
    forward = !forward;
  } while (release(from, to, kWarpBarrier));
}

static bool block_met() {
  bool any = false;
  for (size_t first = 0; first < fibers.size(); first += per_block)
    if (release(first, first + per_block, kBlockBarrier)) any = true, ptx::hopper_met(rank_of(first), false);
  if (!release(0, fibers.size(), kClusterBarrier)) return any;
  for (size_t first = 0; first < fibers.size(); first += per_block) ptx::hopper_met(rank_of(first), true);
  return true;
}
bool has_ended(unsigned rank) {
  auto first = fibers.begin() + rank * per_block;
  return std::all_of(first, first + per_block, [](const Fiber& f) { return f.state == kDone; });
}

// Between the first two barriers the first warp is ahead if `up`, else the last one.
static void run_block(bool up) {
  size_t warps = (fibers.size() + kWarp - 1) / kWarp;
  bool forward = true;
  do {
    for (size_t n = 0; n < warps; ++n) {
      size_t warp = up ? n : warps - 1 - n;
      run_warp(warp * kWarp, std::min<size_t>(fibers.size(), (warp + 1) * kWarp), forward);
    }
    up = !up;
    if (weak) met();
  } while (block_met() || ptx::progress());
  if (!std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.state == kDone; }))
    fail("some threads of a block wait at a barrier that the others never reach");
}
}  // namespace emulator

void emulate(Index grid, Index block, const std::function<void()>& kernel, bool is_weak, bool backwards,
             unsigned cluster) {
  using namespace emulator;
  body = &kernel;
  weak = is_weak;
  if (weak) start_kernel();
  per_block = size_t(block.x) * block.y * block.z;
  if (cluster > kMostBlocks || grid.x % cluster) fail("a grid must be whole clusters, of two blocks at most");
  if (cluster > 1 && (weak || per_block % kWarp)) fail("clusters must be of whole warps, without atomic operations");
  fibers.resize(per_block * cluster);
  for (unsigned bz = 0; bz < grid.z; ++bz)
    for (unsigned by = 0; by < grid.y; ++by)
      for (unsigned bx = 0; bx < grid.x; bx += cluster) {
        Index first{backwards ? grid.x - cluster - bx : bx, backwards ? grid.y - 1 - by : by,
                    backwards ? grid.z - 1 - bz : bz};
        for (size_t i = 0; i < fibers.size(); ++i) {
          Fiber& f = fibers[i];
          f.stack.resize(kStack);
          unsigned n = unsigned(i % per_block);
          f.index = {n % block.x, n / block.x % block.y, n / block.x / block.y};
          f.block = {first.x + rank_of(i), first.y, first.z};
          f.state = kReady;
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.data();
          f.context.uc_stack.ss_size = kStack;
          f.context.uc_link = nullptr;
          makecontext(&f.context, start, 0);
        }
        std::memset(shared_memory, kPoison, cluster * kSharedBytes);
        ptx::start_block();
        ptx::start_hopper_block();
        if (weak) enter_block();
        run_block(!backwards);
        if (weak) leave_block();
        ptx::end_block();
        ptx::end_hopper_block();
      }
  if (weak) end_kernel();
}
