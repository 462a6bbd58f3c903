// The instructions of tensor cores and asynchronous copies, as the PTX ISA describes them, and what accesses cost.
//
// A copy lands as late as it may: its destination holds poison from the moment it is issued until its own thread waits
// for its group. So a wait that is missing, a barrier that should order a wait before another thread's read, and one
// that should order a read before the next copy to the same place all show as wrong results.
//
// mlc.testing.cuda_asm rewrites the `asm` of generated kernels into calls of what is defined here.
#include <map>

namespace ptx {
using emulator::current;
using emulator::fail;
using emulator::fibers;

// -- what accesses cost

// Of one place in the source: requests of warps, the waves of shared memory or the sectors of global memory that they
// take, and the least that accesses of as many bytes could take.
struct Cost { const char* what; bool shared; unsigned bytes; uint64_t requests, taken, least; };
struct Lane { unsigned lane; uintptr_t address; };
extern std::map<int, Cost> costs;

bool in_shared(const void* p);
// Whether so many bytes from an address on lie in one block's shared memory.
bool in_block(unsigned address, unsigned bytes);
// The `place`-th access in the source reads or writes `bytes` at `p`: the n-th time that the lanes of a warp come here
// is one request. An array of the thread's own, on its stack, stands for registers.
void note(int place, const char* what, const void* p, unsigned bytes);
// An instruction accesses 16 bytes at most.
template <typename T> static T* note(int place, const char* what, T* p) {
  constexpr unsigned kMost = 16;
  note(place, what, static_cast<const void*>(p), std::min<unsigned>(sizeof(T), kMost));
  if (sizeof(T) > kMost) note(place + 1, what, reinterpret_cast<const char*>(p) + kMost, sizeof(T) - kMost);
  return p;
}

// Store 16 bytes of registers.
void store(int place, void* to, unsigned a, unsigned b, unsigned c, unsigned d);
// Of a request of lanes, each of so many bytes; shared memory serves 128 bytes' worth of them at a time: `phases`.
unsigned waves(const std::vector<Lane>& lanes, unsigned bytes, unsigned& phases);
void write_costs(const char* path);

// -- asynchronous copies

void copy(int place, unsigned to, const void* from, unsigned bytes, bool wanted = true);
void commit();
// Until at most `pending` committed groups of this thread are under way.
void wait_group(unsigned pending);
void wait_all();

// -- what a warp does together: every lane shows its registers and sees the others'

constexpr unsigned kShown = 8;
struct Shown { uint64_t values[kShown]; };
void start_block();
void end_block();
// Lane `l` of this warp shows `result[l]`. A lane is never more than one round ahead of another.
const Shown* show(const Shown& mine);

// "Warp-level matrix load instruction: ldmatrix": lanes 0-7 name the rows of the first matrix, 8-15 of the second, ...
template <bool kTransposed, typename... Out> static void ldmatrix(int place, unsigned address, Out&... out) {
  constexpr unsigned kCount = sizeof...(Out);
  unsigned lane = current % emulator::kWarp;
  if (address % 16) fail("ldmatrix must have addresses that are multiples of 16");
  if (lane < 8 * kCount) note(2 * place, "ldmatrix", emulator::shared_memory + address, 16);
  const Shown* all = show({{address}});
  unsigned* registers[] = {reinterpret_cast<unsigned*>(&out)...};
  for (unsigned m = 0; m < kCount; ++m) {
    uint16_t pair[2];
    for (unsigned i = 0; i < 2; ++i) {
      unsigned row = kTransposed ? 2 * (lane % 4) + i : lane / 4;
      unsigned column = kTransposed ? lane / 4 : 2 * (lane % 4) + i;
      std::memcpy(&pair[i], emulator::shared_memory + all[8 * m + row].values[0] + 2 * column, 2);
    }
    std::memcpy(registers[m], pair, 4);
  }
  emulator::wait(emulator::kWarpBarrier);  // a lane that went on might write what another still has to read
}

// "cvt.rna.tf32.f32": 10 bits of mantissa, to nearest, ties away from zero; NaN is the one that NVIDIA's GPUs make.
static void to_tf32(unsigned& to, float x) {
  to = std::isnan(x) ? 0x7fffffff : bits_of(x) + (std::isinf(x) ? 0 : 0x1000) & 0xffffe000;
}

// "ex2.approx.ftz.f32": what is not normal is zero, of either side; its last two bits are not to be trusted.
static inline float power_of_two(float x) {
  float power = std::exp2(x);
  if (power < 0x1p-126f) return 0.0f;
  return std::isfinite(power) ? float_of(bits_of(power) ^ (bits_of(x) >> 3 & 3)) : power;
}

// "fma.rn.f16x2" and "fma.rn.bf16x2": of both halves of registers, rounded once.
template <typename T> static unsigned multiply_add(unsigned a, unsigned b, unsigned c) {
  T of_a[2], of_b[2], of_c[2], sums[2];
  std::memcpy(of_a, &a, 4), std::memcpy(of_b, &b, 4), std::memcpy(of_c, &c, 4);
  for (unsigned i = 0; i < 2; ++i) sums[i] = T(float(std::fma(double(of_a[i]), double(of_b[i]), double(of_c[i]))));
  unsigned packed;
  std::memcpy(&packed, sums, 4);
  return packed;
}

template <typename T> static T element(const Shown* all, unsigned lane, unsigned first, unsigned index) {
  T value;
  constexpr unsigned kPer = 4 / sizeof(T);
  unsigned bits = unsigned(all[lane].values[first + index / kPer]);
  std::memcpy(&value, reinterpret_cast<unsigned char*>(&bits) + sizeof(T) * (index % kPer), sizeof(T));
  return value;
}

// "mma.sync.aligned.m16n8k*": the fragments of the figures for 16x8x16 (16 bits), 16x8x32 (8) and 16x8x8 (tf32). With w
// elements in a register, A's register r holds row lane / 4 + 8 (r % 2), columns w (lane % 4) + 4w (r / 2) and on; B's
// register r holds column lane / 4, rows w (lane % 4) + 4w r and on.
template <typename T, typename Sum, typename D>
static void mma(D& d0, D& d1, D& d2, D& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                D c0, D c1, D c2, D c3) {
  constexpr unsigned w = 4 / sizeof(T);
  const Shown* all = show({{a0, a1, a2, a3, b0, b1}});
  unsigned lane = current % emulator::kWarp;
  D sums[4] = {c0, c1, c2, c3};
  for (unsigned i = 0; i < 4; ++i) {
    unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    Sum sum = sums[i];
    for (unsigned k = 0; k < 8 * w; ++k) {
      unsigned of_a = 4 * (row % 8) + k % (4 * w) / w, of_b = 4 * column + k % (4 * w) / w;
      T a = element<T>(all, of_a, 0, w * (row / 8 + 2 * (k / (4 * w))) + k % w);
      T b = element<T>(all, of_b, 4, w * (k / (4 * w)) + k % w);
      sum += Sum(a) * Sum(b);
    }
    sums[i] = D(sum);
  }
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
}  // namespace ptx
