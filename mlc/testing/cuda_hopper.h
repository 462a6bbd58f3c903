// The instructions of Hopper (sm_90a): barriers in shared memory, copies of boxes of tensors, and products of whole
// warpgroups, as the PTX ISA describes them ("mbarrier", "Tensors", "Asynchronous Warpgroup Level Matrix Instructions").
//
// All of them are asynchronous, and land as late as they may. A box's place holds poison from the moment that it is
// asked for until a thread waits for it and no other could go on. A product's sums are poison, and its operands are read,
// only when its group is waited for. What is copied from shared memory to a tensor is read at any time until its group is
// waited for: what is not the same all that time, or not fenced before, is poison.
// What `cuTensorMapEncodeTiled` is told: sizes and boxes in elements, innermost first, strides in bytes, without the
// innermost's; a box spans `box` elements, and has every `step`-th of them.
struct CUtensorMap {
  const char* data;
  unsigned rank, bytes;  // of an element
  uint64_t size[5], stride[5];
  unsigned box[5];
  bool swizzled;  // by 128 bytes
  unsigned step[5];
  unsigned count(unsigned d) const { return (box[d] + step[d] - 1) / step[d]; }
};
#define __grid_constant__

namespace ptx {
// -- barriers in shared memory

void barrier_init(unsigned address, int count);
void fence_barrier_init();
// A block's threads meet, or those of its cluster.
void hopper_met(unsigned rank, bool cluster);
void cluster_meet();
// The same place in the shared memory of another block of the cluster ("mapa").
unsigned map_shared(unsigned address, unsigned rank);
void barrier_arrive(unsigned address, int64_t bytes = 0);
void barrier_arrive_at(unsigned address, unsigned rank);
// Until the phase of this parity has completed: the one under way, or else the one before.
int barrier_wait(unsigned address, unsigned parity);

// "bar": barriers of a block by their numbers. A phase completes with the arrival of so many threads of whole warps, each
// once; none may be left under way.
void bar_arrive(unsigned number, unsigned threads);
void bar_sync(unsigned number, unsigned threads);

// A store to shared memory of what is negative, which nothing may be.
static inline void never_negative(float number, unsigned) {
  if (number < 0) emulator::fail("a number that must be known before products are waited for must not be negative");
}

// -- copies of boxes

void fetch_box(unsigned to, unsigned long long where, std::initializer_list<int> at, unsigned barrier);
// To the same place of each block of the cluster that has a bit in `blocks`, each copy landing by itself.
void fetch_box_of_all(
    unsigned to, unsigned long long where, std::initializer_list<int> at, unsigned barrier, unsigned blocks);

// -- copies of boxes to tensors

// "Warp-level matrix store instruction: stmatrix": lanes 0-7 name the rows of the first matrix, 8-15 of the second, ...;
// a lane holds of each row lane / 4, two elements from 2 (lane % 4) on.
void stmatrix(int place, unsigned address, unsigned a, unsigned b, unsigned c, unsigned d);
void fence_copies();
void store_box(unsigned from, unsigned long long where, std::initializer_list<int> at);
void commit_stores();
// Until at most `pending` groups of this thread read shared memory; the others go on meanwhile as far as they can.
void wait_stores(unsigned pending);

// When nothing else runs: let threads go on whose barrier has completed, else let copies land until some can, else those
// that wait until what they store has been read.
bool progress();
void start_hopper_block();
void end_hopper_block();

// -- products of warpgroups

constexpr unsigned kWarpgroup = 128;
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// A matrix in shared memory that a descriptor names, swizzled by 128 bytes, of elements of 16 bits: rows of A, columns
// of B ("Strides", "Matrix Descriptor Format").
struct Matrix {
  unsigned base, start, leading, stride;  // base: of the block's shared memory
  bool across;  // neighbours along m or n, not along k
  Matrix(uint64_t descriptor, bool is_across);
  unsigned address(unsigned row, unsigned k) const {
    unsigned offset = across ? row % 64 * 2 + row / 64 * leading + k % 8 * 128 + k / 8 * stride
                             : row % 8 * 128 + row / 8 * stride + k * 2;
    return base + swizzled(start + offset) % emulator::kSharedBytes;
  }
  template <typename T> double value(unsigned row, unsigned k) const {
    T held;
    std::memcpy(&held, emulator::shared_memory + address(row, k), sizeof(T));
    return double(float(held));
  }
  // Notes what it costs to read: eight rows of 16 bytes at a time.
  void note_cost(int place, const char* what, unsigned rows) const;
};

// Two neighbouring elements of A in registers of 64 rows: of row 16 (thread / 32) + thread % 32 / 4, of the row 8
// further, and of the same rows with k 8 further; k begins at 2 (thread % 4) ("Register Fragments", A of m64nNk16).
constexpr unsigned kPairs = 4;
// What its warpgroup multiplies is read from the same product of the threads that hold it.
struct Product {
  std::vector<float*> sums;
  std::function<double(unsigned row, unsigned k)> a;  // in shared memory; else
  std::vector<const unsigned*> pairs;
  std::function<double(unsigned pair, unsigned which)> half;  // the elements in them
  std::function<double(unsigned column, unsigned k)> b;
  bool adds;
};
void wgmma_fence();
void issue(Product product);
void wgmma_commit();
// Until at most `pending` groups are under way. Sum i of a thread is that of the figure for m64nNk16.D: row
// 16 (thread / 32) + thread % 32 / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (thread % 4) + i % 2.
void wgmma_wait(unsigned pending);

template <typename T, bool kAcross>
static std::function<double(unsigned, unsigned)> in_shared(int place, const char* what, uint64_t descriptor, unsigned rows) {
  Matrix matrix(descriptor, kAcross);
  if (current % kWarpgroup == 0) matrix.note_cost(place, what, rows);
  return [=](unsigned row, unsigned k) { return matrix.value<T>(row, k); };
}

template <typename T, bool kAcrossA, bool kAcrossB, typename... Sums>
static void wgmma(int place, uint64_t a, uint64_t b, int adds, Sums&... sums) {
  constexpr unsigned kColumns = 2 * sizeof...(Sums);
  issue({{&sums...}, in_shared<T, kAcrossA>(2 * place, "wgmma a", a, 64), {}, {},
         in_shared<T, kAcrossB>(2 * place + 1, "wgmma b", b, kColumns), adds != 0});
}

template <typename T, bool kAcross, typename... Sums>
static void wgmma_registers(int place, const unsigned& a0, const unsigned& a1, const unsigned& a2, const unsigned& a3,
                            uint64_t b, int adds, Sums&... sums) {
  constexpr unsigned kColumns = 2 * sizeof...(Sums);
  std::vector<const unsigned*> pairs{&a0, &a1, &a2, &a3};
  auto half = [=](unsigned pair, unsigned which) {
    T held;
    std::memcpy(&held, reinterpret_cast<const char*>(pairs[pair]) + which * sizeof(T), sizeof(T));
    return double(float(held));
  };
  issue({{&sums...}, {}, pairs, half, in_shared<T, kAcross>(2 * place + 1, "wgmma b", b, kColumns), adds != 0});
}
}  // namespace ptx
