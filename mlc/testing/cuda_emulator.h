// Runs the kernels that TVM generates for CUDA on a CPU, one thread block after another, one fiber for each thread.
//
// A fiber runs until it waits for a barrier or a shuffle, so between two barriers the threads run strictly one after
// another, first to last and last to first in turn: a value read before the barrier that should order it is wrong.
// The includer defines the kernels and calls emulate(grid, block, kernel).
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

// as in CUDA, the arguments may be of different types (a double constant beside a float)
template <typename A, typename B> static inline A max(A a, B b) { return a < b ? A(b) : a; }
template <typename A, typename B> static inline A min(A a, B b) { return b < a ? A(b) : a; }

struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define uint unsigned int
#define uchar unsigned char

template <typename T> struct alignas(2 * sizeof(T)) Two { T x, y; };
template <typename T> struct alignas(4 * sizeof(T)) Four { T x, y, z, w; };
using float2 = Two<float>;
using float4 = Four<float>;
using int2 = Two<int>;
using int4 = Four<int>;
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace emulator {
enum State { kReady, kBlockBarrier, kWarpBarrier, kDone };
constexpr unsigned kWarp = 32;
constexpr size_t kStack = 64 * 1024;

struct Fiber { ucontext_t context; State state; Index index; uint64_t slot; std::vector<char> stack; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static const std::function<void()>* body;

static void wait(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

static void start() {
  (*body)();
  wait(kDone);
}

static void fail(const char* reason) {
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

static void run_block() {
  for (bool forward = true;; forward = !forward) {
    bool ran = false;
    for (size_t n = 0; n < fibers.size(); ++n) {
      current = forward ? n : fibers.size() - 1 - n;
      if (fibers[current].state != kReady) continue;
      ran = true;
      threadIdx = fibers[current].index;
      swapcontext(&scheduler, &fibers[current].context);
    }
    bool released = false;
    for (size_t w = 0; w < fibers.size(); w += kWarp)
      released |= release(w, std::min<size_t>(fibers.size(), w + kWarp), kWarpBarrier);
    if (!released) released = release(0, fibers.size(), kBlockBarrier);
    if (released) continue;
    if (!ran && !std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.state == kDone; }))
      fail("some threads of a block wait at a barrier that the others never reach");
    if (!ran) return;
  }
}
}  // namespace emulator

static void emulate(Index grid, Index block, const std::function<void()>& kernel) {
  using namespace emulator;
  body = &kernel;
  fibers.resize(size_t(block.x) * block.y * block.z);
  for (unsigned bz = 0; bz < grid.z; ++bz)
    for (unsigned by = 0; by < grid.y; ++by)
      for (unsigned bx = 0; bx < grid.x; ++bx) {
        blockIdx = {bx, by, bz};
        for (size_t i = 0; i < fibers.size(); ++i) {
          Fiber& f = fibers[i];
          f.stack.resize(kStack);
          f.index = {unsigned(i % block.x), unsigned(i / block.x % block.y), unsigned(i / block.x / block.y)};
          f.state = kReady;
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.data();
          f.context.uc_stack.ss_size = kStack;
          f.context.uc_link = nullptr;
          makecontext(&f.context, start, 0);
        }
        run_block();
      }
}

static inline void __syncthreads() { emulator::wait(emulator::kBlockBarrier); }
static inline void __syncwarp(unsigned = ~0u) { emulator::wait(emulator::kWarpBarrier); }
static inline unsigned __activemask() { return ~0u; }

template <typename T> static T exchange(T value, unsigned source) {
  using namespace emulator;
  unsigned self = current;
  std::memcpy(&fibers[self].slot, &value, sizeof(T));
  wait(kWarpBarrier);
  T result = value;
  if (source < fibers.size()) std::memcpy(&result, &fibers[source].slot, sizeof(T));
  wait(kWarpBarrier);
  return result;
}

template <typename T> static T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  unsigned self = emulator::current;
  return exchange(value, self - self % width + unsigned(lane) % width);
}
template <typename T> static T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  unsigned self = emulator::current;
  return exchange(value, self % width + delta < unsigned(width) ? self + delta : self);
}
template <typename T> static T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return exchange(value, emulator::current ^ unsigned(mask));
}
