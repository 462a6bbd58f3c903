// Runs the kernels that TVM generates for CUDA on a CPU, one thread block after another, one fiber for each thread.
//
// A fiber runs until it waits for a barrier or a shuffle, and a warp until it waits for the block or a barrier in
// memory. So between two barriers of a block one warp is far ahead of the others, and between two of a warp one thread,
// the first and the last in turn: a value that is read before the barrier that should order it is wrong.
// Shared memory holds poison, NaN in every type of floats, when a block begins.
// What blocks tell each other through global memory is in cuda_global.h.
// The includer defines the kernels and calls emulate(grid, block, kernel). What does not depend on them is compiled by
// itself, from the files *.cc that are named as these headers are.
#pragma once
#include <ucontext.h>
#include <unistd.h>

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
// as in CUDA, those of floats give the number where one side is NaN; these of what is generated do not
template <typename A, typename B> static inline A nan_max(A a, B b) { return a != a ? a : b != b ? A(b) : max(a, b); }
template <typename A, typename B> static inline A nan_min(A a, B b) { return a != a ? a : b != b ? A(b) : min(a, b); }

struct Index { unsigned x, y, z; };
extern Index threadIdx, blockIdx;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
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
using char2 = Two<signed char>;
using uchar2 = Two<unsigned char>;
using char4 = Four<signed char>;
static inline uchar2 make_uchar2(unsigned char x, unsigned char y) { return {x, y}; }
static inline char2 make_char2(signed char x, signed char y) { return {x, y}; }
static inline char4 make_char4(signed char x, signed char y, signed char z, signed char w) { return {x, y, z, w}; }
using ushort2 = Two<unsigned short>;
using ushort4 = Four<unsigned short>;
using uint2 = Two<unsigned>;
using uint4 = Four<unsigned>;
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using longlong2 = Two<long long>;
static inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }

// eight numbers of 32 bits, two in each
struct alignas(16) ulonglong4 { unsigned long long x, y, z, w; };
struct alignas(16) longlong4 { long long x, y, z, w; };
static inline longlong4 make_longlong4(long long x, long long y, long long z, long long w) { return {x, y, z, w}; }

// 16-bit floats: stored as bits, rounded to nearest even, computed with as float32 and rounded after each operation
static inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
static inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
struct half {
  uint16_t bits;
  half() = default;
  half(float x) {
    uint32_t b = bits_of(x), sign = b >> 16 & 0x8000, magnitude = b & 0x7fffffff;
    if (magnitude > 0x7f800000) bits = uint16_t(sign | 0x7e00);
    else if (magnitude >= 0x477ff000) bits = uint16_t(sign | 0x7c00);  // at least half a unit beyond the largest
    else if (magnitude < 0x38800000)  // below the normal numbers: steps of 2^-24
      bits = uint16_t(sign | uint32_t(std::nearbyint(double(float_of(magnitude)) * 16777216.0)));
    else bits = uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - 0x1c000);
  }
  operator float() const {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 0x1p-24f;
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  }
};
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float x) {
    uint32_t b = bits_of(x);
    bits = (b & 0x7fffffff) > 0x7f800000 ? uint16_t(b >> 16 | 0x40) : uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
  }
  operator float() const { return float_of(uint32_t(bits) << 16); }
};
// float32 of which the tensor cores take the upper 19 bits
struct tensor_float {
  uint32_t bits;
  operator float() const { return float_of(bits & 0xffffe000); }
};
using __half = half;
using __nv_bfloat16 = nv_bfloat16;
using half2 = Two<half>;
using half4 = Four<half>;
using nv_bfloat162 = Two<nv_bfloat16>;
using nv_bfloat164 = Four<nv_bfloat16>;
template <typename T> static inline T __habs(T x) { return std::fabs(float(x)); }
template <typename T> static inline T hceil(T x) { return std::ceil(float(x)); }
template <typename T> static inline T hfloor(T x) { return std::floor(float(x)); }
template <typename T> static inline T htrunc(T x) { return std::trunc(float(x)); }
static inline float __half2float(half x) { return x; }
static inline half __float2half_rn(float x) { return x; }
static inline float __bfloat162float(nv_bfloat16 x) { return x; }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline half2 make_half2(half x, half y) { return {x, y}; }
static inline half4 make_half4(half x, half y, half z, half w) { return {x, y, z, w}; }
static inline nv_bfloat162 make_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
static inline nv_bfloat164 make_nv_bfloat164(nv_bfloat16 x, nv_bfloat16 y, nv_bfloat16 z, nv_bfloat16 w) {
  return {x, y, z, w};
}
static inline unsigned __pack_half2(half x, half y) { return unsigned(y.bits) << 16 | x.bits; }
static inline unsigned __pack_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return unsigned(y.bits) << 16 | x.bits; }

#include "cuda_global.h"

namespace emulator {
enum State { kReady, kBlockBarrier, kClusterBarrier, kWarpBarrier, kPolling, kLate, kDone };
constexpr unsigned kWarp = 32;
constexpr size_t kSharedBytes = 256 * 1024;
constexpr unsigned kMostBlocks = 2;  // of a cluster
constexpr int kPoison = 0xff;
extern unsigned char shared_memory[kMostBlocks * kSharedBytes];  // of a cluster's blocks, one after another
extern size_t static_shared;  // bytes of `__shared__` arrays, which lie behind each other

struct Fiber { ucontext_t context; State state; Index index, block; uint64_t slot; std::vector<char> stack; };
extern std::vector<Fiber> fibers;
extern unsigned current;
extern size_t per_block;  // fibers

// The number of a fiber's block in its cluster, and the current one's own part of shared memory.
unsigned rank_of(size_t fiber);
unsigned char* own_shared();
void wait(State state);
[[noreturn]] void fail(const char* reason);
bool has_ended(unsigned rank);

// An array that the block's threads share; each declaration in the source has a number of its own.
template <typename T, size_t kCount, int kNumber> static T* shared_array() {
  static size_t at = (static_shared + 63) / 64 * 64;
  static bool placed = (static_shared = at + kCount * sizeof(T), true);
  if (!placed || static_shared > kSharedBytes) fail("a block's arrays must fit shared memory");
  return reinterpret_cast<T*>(own_shared() + at);
}
}  // namespace emulator

static inline unsigned __cvta_generic_to_shared(const void* p) {
  return unsigned(static_cast<const unsigned char*>(p) - emulator::shared_memory);
}

#include "cuda_ptx.h"
#include "cuda_hopper.h"

// Blocks and warps run from the last to the first at first if `backwards`; `is_weak` as in cuda_global.h. The blocks of a
// cluster, so many neighbours along x, run at a time.
void emulate(Index grid, Index block, const std::function<void()>& kernel, bool is_weak = false, bool backwards = false,
             unsigned cluster = 1);

static inline void __syncthreads() { emulator::wait(emulator::kBlockBarrier); }
// Whether any thread of the block says so.
static inline int __syncthreads_or(int said) {
  using namespace emulator;
  fibers[current].slot = uint64_t(said != 0);
  wait(kBlockBarrier);
  int any = 0;
  size_t first = current / per_block * per_block;
  for (size_t i = first; i < first + per_block; ++i) any |= int(fibers[i].slot);
  wait(kBlockBarrier);  // a thread that went on might say something else
  return any;
}
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
