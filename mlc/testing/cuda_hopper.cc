// Barriers in memory, boxes and warpgroups; see cuda_hopper.h.
#include "cuda_emulator.h"

#include <deque>

namespace ptx {
// -- barriers in shared memory

struct Barrier {
  int expected, pending;
  int64_t bytes = 0;  // that are under way
  unsigned phase = 0;
  unsigned maker;
  bool fenced = false, met = false, known = false;  // to the block, to the cluster
};
static std::map<unsigned, Barrier> barriers;  // by their address
struct Waiting { unsigned address, parity; };
static std::vector<Waiting> waiting;  // by thread

static Barrier& barrier_at(unsigned address) {
  auto found = barriers.find(address);
  if (found == barriers.end()) fail("a barrier must be initialised before it is used");
  Barrier& b = found->second;
  if (b.maker != current && !b.met) fail("a barrier must be fenced and its block meet before other threads use it");
  unsigned rank = address / emulator::kSharedBytes;
  if (rank == emulator::rank_of(current)) return b;
  if (!b.known) fail("a barrier must be fenced and its cluster meet before other blocks use it");
  if (emulator::has_ended(rank)) fail("a barrier must not be of a block that has ended");
  return b;
}

static void complete_if_done(Barrier& b) {
  if (b.pending || b.bytes) return;
  b.phase++;
  b.pending = b.expected;
}

void barrier_init(unsigned address, int count) {
  if (address % 8) fail("a barrier must lie at a multiple of 8 bytes");
  Barrier b{count, count};
  b.maker = current;
  barriers[address] = b;
}
void fence_barrier_init() {
  for (auto& each : barriers)
    if (each.second.maker == current) each.second.fenced = true;
}
void hopper_met(unsigned rank, bool cluster) {
  for (auto& each : barriers) {
    if (each.first / emulator::kSharedBytes != rank) continue;
    each.second.met |= each.second.fenced;
    each.second.known |= cluster && each.second.fenced;
  }
}
void cluster_meet() { emulator::wait(emulator::kClusterBarrier); }
unsigned map_shared(unsigned address, unsigned rank) {
  if (rank >= fibers.size() / emulator::per_block) fail("a block of the cluster must be asked for, got a number beyond");
  return address % emulator::kSharedBytes + rank * emulator::kSharedBytes;
}
void barrier_arrive(unsigned address, int64_t bytes) {
  Barrier& b = barrier_at(address);
  b.bytes += bytes;
  if (--b.pending < 0) fail("more threads arrive at a barrier than it was initialised for");
  complete_if_done(b);
}
void barrier_arrive_at(unsigned address, unsigned rank) { barrier_arrive(map_shared(address, rank)); }
static bool completed(const Waiting& w) { return barriers.at(w.address).phase % 2 != w.parity; }
int barrier_wait(unsigned address, unsigned parity) {
  barrier_at(address);
  waiting[current] = {address, parity};
  while (!completed(waiting[current])) emulator::wait(emulator::kPolling);
  return 1;
}

// -- barriers of a block by number, which have addresses beyond shared memory here

constexpr unsigned kNumbered = 1u << 31, kMostNumbers = 16;
static std::map<unsigned, std::vector<unsigned>> arrived;  // in the phase under way, by address

// Counts the current thread; the address.
static unsigned arrive_numbered(unsigned number, unsigned threads) {
  if (number < 1 || number >= kMostNumbers) fail("a barrier of a number must have one from 1 to 15");
  if (!threads || threads % emulator::kWarp || threads > emulator::per_block)
    fail("a barrier of a number must be of whole warps of its block");
  unsigned address = kNumbered + emulator::rank_of(current) * kMostNumbers + number;
  Barrier& b = barriers.emplace(address, Barrier{int(threads), int(threads)}).first->second;
  if (b.expected != int(threads)) fail("all must say the same of how many threads arrive at a barrier");
  auto& here = arrived[address];
  if (std::find(here.begin(), here.end(), current) != here.end()) fail("a thread must arrive once in a barrier's phase");
  here.push_back(current);
  b.pending--;
  complete_if_done(b);
  if (b.pending == b.expected) here.clear();
  return address;
}
void bar_arrive(unsigned number, unsigned threads) { arrive_numbered(number, threads); }
void bar_sync(unsigned number, unsigned threads) {
  unsigned address = kNumbered + emulator::rank_of(current) * kMostNumbers + number;
  auto found = barriers.find(address);
  waiting[current] = {address, found == barriers.end() ? 0 : found->second.phase % 2};
  arrive_numbered(number, threads);
  while (!completed(waiting[current])) emulator::wait(emulator::kPolling);
}

// -- copies of boxes

struct Box { unsigned to; const CUtensorMap* map; int at[5]; unsigned barrier; };
static std::deque<Box> boxes;
static bool newest;  // lands next

static void check(const CUtensorMap& map, size_t coordinates) {
  if (coordinates != map.rank) fail("a box must have as many coordinates as its tensor");
  if (map.swizzled && map.box[0] * map.bytes > 128) fail("a swizzled box must be at most 128 bytes wide");
  for (unsigned d = 0; d < map.rank; ++d) {
    if (map.box[d] < 1 || map.box[d] > 256) fail("a box must span 1 to 256 elements of each dimension");
    if (map.step[d] < 1 || map.step[d] > (d ? 8 : 1)) fail("a box must have every element up to every eighth, of the innermost dimension every one");
    if (d && map.stride[d - 1] % 16) fail("the strides of a tensor must be multiples of 16 bytes");
  }
}

static unsigned box_bytes(const CUtensorMap& map) {
  unsigned bytes = map.bytes;
  for (unsigned d = 0; d < map.rank; ++d) bytes *= map.count(d);
  return bytes;
}

// The numbers of a box, one after another: where each lies in shared memory, and in the tensor, or null outside of it.
template <typename Visit>
static void each_number(const CUtensorMap& m, const int* at, unsigned place, Visit visit) {
  unsigned count = box_bytes(m) / m.bytes;
  for (unsigned i = 0; i < count; ++i) {
    unsigned rest = i;
    int64_t offset = 0;
    bool inside = true;
    for (unsigned d = 0; d < m.rank; ++d) {
      int64_t number = int64_t(at[d]) + rest % m.count(d) * m.step[d];
      rest /= m.count(d);
      inside &= number >= 0 && number < int64_t(m.size[d]);
      offset += number * int64_t(d ? m.stride[d - 1] : m.bytes);
    }
    unsigned here = place + i * m.bytes;
    visit(m.swizzled ? swizzled(here) : here, inside ? const_cast<char*>(m.data) + offset : nullptr);
  }
}

void fetch_box(unsigned to, unsigned long long where, std::initializer_list<int> at, unsigned barrier) {
  auto map = reinterpret_cast<const CUtensorMap*>(where);
  check(*map, at.size());
  if (to % 128) fail("a box must be copied to a multiple of 128 bytes");
  if (!in_block(to, box_bytes(*map))) fail("a box must be copied into shared memory");
  barrier_at(barrier);
  Box b{to, map, {}, barrier};
  std::copy(at.begin(), at.end(), b.at);
  std::memset(emulator::shared_memory + to, emulator::kPoison, box_bytes(*map));
  boxes.push_back(b);
}

void fetch_box_of_all(
    unsigned to, unsigned long long where, std::initializer_list<int> at, unsigned barrier, unsigned blocks) {
  for (unsigned rank = 0; blocks >> rank; ++rank)
    if (blocks >> rank & 1) fetch_box(map_shared(to, rank), where, at, map_shared(barrier, rank));
}

// Whether some thread can't go on before it has landed.
static bool awaited(const Box& box) {
  for (size_t i = 0; i < fibers.size(); ++i)
    if (fibers[i].state == emulator::kPolling && waiting[i].address == box.barrier) return true;
  return false;
}

// One copy lands, the oldest or the newest in turn of those that a thread waits for, else of all; what lies outside of
// the tensor is zero. Whether there was any.
static bool land_box() {
  if (boxes.empty()) return false;
  auto next = std::find_if(boxes.begin(), boxes.end(), awaited);
  if (newest || next == boxes.end()) {
    auto last = std::find_if(boxes.rbegin(), boxes.rend(), awaited);
    next = last != boxes.rend() ? last.base() - 1 : newest ? boxes.end() - 1 : boxes.begin();
  }
  Box b = *next;
  boxes.erase(next);
  newest = !newest;
  if (emulator::has_ended(b.to / emulator::kSharedBytes)) fail("a copy must not land in a block that has ended");
  const CUtensorMap& m = *b.map;
  each_number(m, b.at, b.to, [&](unsigned here, const char* from) {
    if (from) std::memcpy(emulator::shared_memory + here, from, m.bytes);
    else std::memset(emulator::shared_memory + here, 0, m.bytes);
  });
  Barrier& barrier = barriers.at(b.barrier);
  barrier.bytes -= box_bytes(m);
  complete_if_done(barrier);
  return true;
}

// -- copies of boxes to tensors

constexpr unsigned kNobody = ~0u;
static std::vector<unsigned> unfenced;  // of each byte of shared memory: who has written it and not fenced since
struct Stored { unsigned from; const CUtensorMap* map; int at[5]; std::vector<unsigned char> seen; };
static std::vector<std::deque<std::vector<Stored>>> stores;  // by thread: committed groups, the open one last

void stmatrix(int place, unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  unsigned lane = current % emulator::kWarp;
  if (address % 16) fail("stmatrix must have addresses that are multiples of 16");
  note(2 * place, "stmatrix", emulator::shared_memory + address, 16);
  const Shown* all = show({{a, b, c, d}});
  for (unsigned i = 0; i < 4; ++i) {
    uint32_t pair = uint32_t(all[lane % 8 * 4 + i].values[lane / 8]);
    std::memcpy(emulator::shared_memory + address + 4 * i, &pair, 4);
  }
  std::fill_n(unfenced.begin() + address, 16, current);
}
void fence_copies() {
  std::replace(unfenced.begin(), unfenced.end(), current, kNobody);
}

void store_box(unsigned from, unsigned long long where, std::initializer_list<int> at) {
  auto map = reinterpret_cast<const CUtensorMap*>(where);
  check(*map, at.size());
  if (from % 128) fail("a box must be copied from a multiple of 128 bytes");
  if (!in_block(from, box_bytes(*map))) fail("a box must be copied from shared memory");
  auto begin = emulator::shared_memory + from;
  Stored s{from, map, {}, {begin, begin + box_bytes(*map)}};
  std::copy(at.begin(), at.end(), s.at);
  for (unsigned i = 0; i < s.seen.size(); ++i)
    if (unfenced[from + i] != kNobody) s.seen[i] = emulator::kPoison;
  stores[current].back().push_back(s);
}
void commit_stores() { stores[current].emplace_back(); }

void wait_stores(unsigned pending) {
  auto& mine = stores[current];
  if (mine.size() <= pending + 1) return;
  emulator::wait(emulator::kLate);
  for (; mine.size() > pending + 1; mine.pop_front())
    for (const Stored& s : mine.front())
      each_number(*s.map, s.at, s.from, [&](unsigned here, char* to) {
        for (unsigned b = 0; to && b < s.map->bytes; ++b) {
          unsigned char was = s.seen[here + b - s.from], now = emulator::shared_memory[here + b];
          to[b] = char(was == now ? now : emulator::kPoison);
        }
      });
}

bool progress() {
  bool polled, ready = false;
  do {
    polled = false;
    for (size_t i = 0; i < fibers.size(); ++i) {
      if (fibers[i].state != emulator::kPolling) continue;
      polled = true;
      if (completed(waiting[i])) fibers[i].state = emulator::kReady, ready = true;
    }
  } while (!ready && polled && land_box());
  for (size_t i = 0; i < fibers.size() && !ready; ++i)
    if (fibers[i].state == emulator::kLate) fibers[i].state = emulator::kReady, ready = true;
  return ready;
}

// -- products of warpgroups

Matrix::Matrix(uint64_t descriptor, bool is_across) : across(is_across) {
  base = unsigned(emulator::own_shared() - emulator::shared_memory);
  start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) fail("the emulator knows matrices that are swizzled by 128 bytes alone");
  if (descriptor >> 49 & 7 || start >> 7 & 7) fail("a matrix must begin where its swizzle's pattern does");
}

void Matrix::note_cost(int place, const char* what, unsigned rows) const {
  Cost& cost = costs[place];
  cost.what = what, cost.shared = true, cost.bytes = 16;
  for (unsigned row = 0; row < rows; row += 8)
    for (unsigned k = 0; k < 16; k += 8) {
      std::vector<Lane> lanes;
      for (unsigned i = 0; i < 8; ++i) lanes.push_back({i, across ? address(row, k + i) : address(row + i, k)});
      unsigned phases = 0;
      cost.requests++;
      cost.taken += waves(lanes, 16, phases);
      cost.least += phases;
    }
}

struct Warpgroup {
  bool fenced = false;
  std::vector<std::vector<Product>> groups{{}};  // the open one last
  std::map<float*, std::pair<float, unsigned>> held;  // sums under way, and how many products are
};
static std::vector<Warpgroup> warpgroups;  // what each thread has issued

void wgmma_fence() { warpgroups[current].fenced = true; }

void issue(Product product) {
  Warpgroup& mine = warpgroups[current];
  if (!mine.fenced) fail("a product must come after a fence of its warpgroup's registers");
  for (float* sum : product.sums) {
    auto& held = mine.held.emplace(sum, std::make_pair(*sum, 0u)).first->second;
    held.second++;
    std::memset(sum, emulator::kPoison, sizeof(float));
  }
  mine.groups.back().push_back(product);
}

void wgmma_commit() { warpgroups[current].groups.emplace_back(); }

// Element `k` of a thread's row of product `number` of group `group`.
static double multiplied(unsigned group, unsigned number, unsigned row, unsigned k) {
  const Product& own = warpgroups[current].groups[group][number];
  if (own.pairs.empty()) return own.a(row, k);
  unsigned holder = current / 32 * 32 + row % 8 * 4 + k % 8 / 2;
  const auto& groups = warpgroups[holder].groups;
  if (group >= groups.size() || number >= groups[group].size() || groups[group][number].pairs.empty())
    fail("all threads of a warp must multiply together");
  return groups[group][number].half(row / 8 % 2 + k / 8 * 2, k % 2);
}

void wgmma_wait(unsigned pending) {
  emulator::wait(emulator::kWarpBarrier);  // what other threads of the warp hold is read, of none that went on
  Warpgroup& mine = warpgroups[current];
  unsigned thread = current % kWarpgroup;
  unsigned done = unsigned(mine.groups.size()) > pending + 1 ? unsigned(mine.groups.size()) - pending - 1 : 0;
  for (unsigned group = 0; group < done; ++group)
    for (unsigned number = 0; number < mine.groups[group].size(); ++number) {
      const Product& p = mine.groups[group][number];
      for (unsigned i = 0; i < p.sums.size(); ++i) {
        auto found = mine.held.find(p.sums[i]);
        float& sum = found->second.first;
        unsigned row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (thread % 4) + i % 2;
        double of = 0;
        for (unsigned k = 0; k < 16; ++k) of += multiplied(group, number, row, k) * p.b(column, k);
        sum = float((p.adds ? double(sum) : 0.0) + of);
        if (--found->second.second) continue;
        *p.sums[i] = sum;
        mine.held.erase(found);
      }
    }
  emulator::wait(emulator::kWarpBarrier);
  mine.groups.erase(mine.groups.begin(), mine.groups.begin() + done);
  mine.fenced = false;
}

void start_hopper_block() {
  barriers.clear();
  arrived.clear();
  boxes.clear();
  newest = false;
  waiting.assign(fibers.size(), {});
  unfenced.assign(sizeof emulator::shared_memory, kNobody);
  stores.assign(fibers.size(), {});
  for (auto& of_thread : stores) of_thread.emplace_back();
  warpgroups.assign(fibers.size(), {});
}

void end_hopper_block() {
  if (!boxes.empty()) fail("a copy must be waited for before its block ends");
  for (auto& each : arrived)
    if (!each.second.empty()) fail("a barrier of a number must not be left by some of its threads");
  for (auto& of_thread : stores)
    for (auto& group : of_thread)
      if (!group.empty()) fail("a store must be waited for before its thread ends");
  for (auto& each : warpgroups)
    if (!each.held.empty()) fail("a product must be waited for before its thread ends");
}
}  // namespace ptx
