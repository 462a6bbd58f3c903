// What blocks see of each other's writes; see cuda_global.h.
#include "cuda_emulator.h"

namespace emulator {
std::vector<Array> arrays;
bool weak;
using Memory = std::vector<std::vector<char>>;
// of all arrays: when the kernel began; what was told to all; what is left when it ends; what this block saw last of
// others; what it had written when its threads last met; and when that was last fenced
static Memory before, told, after, seen, gathered, fenced;
static bool counted;  // this block has, since it began

static Memory copied() {
  Memory memory;
  for (const Array& a : arrays) memory.emplace_back(a.data, a.data + a.size);
  return memory;
}

static void put(const Memory& memory) {
  for (size_t i = 0; i < arrays.size(); ++i) std::memcpy(arrays[i].data, memory[i].data(), arrays[i].size);
}

// What differs between `now` and what this block saw, written to `to`.
static void write_own(const Memory& now, Memory& to) {
  for (size_t i = 0; i < now.size(); ++i)
    for (size_t b = 0; b < now[i].size(); ++b)
      if (now[i][b] != seen[i][b]) to[i][b] = now[i][b];
}

void start_kernel() { before = told = after = copied(); }
void end_kernel() { put(after); }

void enter_block() {
  put(before);
  seen = gathered = fenced = before;
  counted = false;
}
void leave_block() { write_own(copied(), after); }

void met() { gathered = copied(); }

// What the threads had written when they met is told from here on; after counting, what others have told is seen.
void fence() {
  fenced = gathered;
  if (!counted) return;
  Memory own = copied(), now = told;
  write_own(own, now);
  write_own(own, after);
  put(now);
  seen = gathered = fenced = now;
}

void count() {
  write_own(fenced, told);
  counted = true;
}
}  // namespace emulator
