// What accesses cost, and copies that land late; see cuda_ptx.h.
#include "cuda_emulator.h"

#include <tuple>

namespace ptx {
std::map<int, Cost> costs;
static std::map<std::tuple<int, unsigned, unsigned>, std::vector<Lane>> open_requests;
static std::map<std::pair<int, unsigned>, unsigned> executed;
constexpr unsigned kBanks = 32, kWord = 4, kSector = 32;

bool in_shared(const void* p) {
  auto at = static_cast<const unsigned char*>(p);
  return at >= emulator::shared_memory && at < emulator::shared_memory + sizeof emulator::shared_memory;
}

bool in_block(unsigned address, unsigned bytes) {
  return address % emulator::kSharedBytes + bytes <= emulator::kSharedBytes;
}

void note(int place, const char* what, const void* p, unsigned bytes) {
  const auto& stack = fibers[current].stack;
  if (p >= stack.data() && p < stack.data() + stack.size()) return;
  Cost& cost = costs[place];
  cost.what = what, cost.shared = in_shared(p), cost.bytes = bytes;
  unsigned turn = executed[{place, current}]++;
  open_requests[{place, current / emulator::kWarp, turn}].push_back({current % emulator::kWarp, uintptr_t(p)});
}

void store(int place, void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  if (uintptr_t(to) % 16) fail("a store of 16 bytes must have an aligned address");
  if (in_shared(to)) fail("a store to global memory must not write to shared memory");
  note(2 * place, "st.global", to, 16);
  unsigned words[] = {a, b, c, d};
  std::memcpy(to, words, 16);
}

// Shared memory serves 128 bytes' worth of lanes at a time; a bank gives one of its words in each wave.
unsigned waves(const std::vector<Lane>& lanes, unsigned bytes, unsigned& phases) {
  unsigned each = std::max(1u, kBanks * kWord / bytes), total = 0;
  std::map<unsigned, std::map<unsigned, std::vector<uintptr_t>>> words;  // by phase and bank
  for (const Lane& l : lanes)
    for (unsigned b = 0; b < std::max(bytes, kWord); b += kWord) {
      uintptr_t word = (l.address + b) / kWord;
      auto& bank = words[l.lane / std::min(each, emulator::kWarp)][word % kBanks];
      if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
    }
  for (auto& phase : words) {
    size_t most = 0;
    for (auto& bank : phase.second) most = std::max(most, bank.second.size());
    total += most;
  }
  phases = words.size();
  return total;
}

static void settle_costs() {
  for (auto& request : open_requests) {
    Cost& cost = costs[std::get<0>(request.first)];
    cost.requests++;
    if (cost.shared) {
      unsigned phases = 0;
      cost.taken += waves(request.second, cost.bytes, phases);
      cost.least += phases;
      continue;
    }
    std::vector<uintptr_t> sectors;
    for (const Lane& l : request.second)
      for (uintptr_t s = l.address / kSector; s <= (l.address + cost.bytes - 1) / kSector; ++s)
        if (std::find(sectors.begin(), sectors.end(), s) == sectors.end()) sectors.push_back(s);
    cost.taken += sectors.size();
    cost.least += (request.second.size() * cost.bytes + kSector - 1) / kSector;
  }
  open_requests.clear();
  executed.clear();
}

void write_costs(const char* path) {
  FILE* f = std::fopen(path, "w");
  for (auto& each : costs)
    std::fprintf(f, "%s\t%d\t%u\t%lu\t%lu\t%lu\n", each.second.what, each.second.shared, each.second.bytes,
                 (unsigned long)each.second.requests, (unsigned long)each.second.taken,
                 (unsigned long)each.second.least);
  std::fclose(f);
}

struct Copy { unsigned char* to; const unsigned char* from; unsigned bytes; };
static std::vector<std::vector<std::vector<Copy>>> groups;  // by thread: committed groups, the open one last

void end_block() {
  for (auto& of_thread : groups)
    for (auto& group : of_thread)
      if (!group.empty()) fail("a copy must be waited for before its thread ends");
  settle_costs();
}

void copy(int place, unsigned to, const void* from, unsigned bytes, bool wanted) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async must copy 4, 8 or 16 bytes");
  if (to % bytes || (wanted && uintptr_t(from) % bytes)) fail("cp.async must have aligned addresses");
  if (!in_block(to, bytes)) fail("cp.async must write into shared memory");
  unsigned char* place_to = emulator::shared_memory + to;
  note(2 * place, "cp.async to", place_to, bytes);
  if (!wanted) {
    std::memset(place_to, 0, bytes);
    return;
  }
  note(2 * place + 1, "cp.async from", from, bytes);
  std::memset(place_to, emulator::kPoison, bytes);
  groups[current].back().push_back({place_to, static_cast<const unsigned char*>(from), bytes});
}
void commit() { groups[current].emplace_back(); }
void wait_group(unsigned pending) {
  auto& mine = groups[current];
  while (mine.size() > pending + 1) {
    for (const Copy& c : mine.front()) std::memcpy(c.to, c.from, c.bytes);
    mine.erase(mine.begin());
  }
}
void wait_all() {
  commit();
  wait_group(0);
}

static std::vector<Shown> shown[2];
static std::vector<unsigned> rounds;

void start_block() {
  groups.assign(fibers.size(), {{}});
  rounds.assign(fibers.size(), 0);
  for (auto& each : shown) each.assign(fibers.size(), {});
}

const Shown* show(const Shown& mine) {
  unsigned round = rounds[current]++ % 2;
  shown[round][current] = mine;
  unsigned first = current / emulator::kWarp * emulator::kWarp;
  emulator::wait(emulator::kWarpBarrier);
  return shown[round].data() + first;
}
}  // namespace ptx
