// What blocks of threads see of each other's global memory while a kernel runs: as little as they may.
//
// In a kernel with atomic operations, a block sees memory as it was when the kernel began, and what it wrote itself. What
// else it sees must have been told, by the way that the PTX ISA's memory model asks for: the threads that wrote meet at
// a barrier of their block, a thread of theirs then fences, and only then counts itself by an atomic operation; a thread
// of the reading block counts itself after that, and then fences. A step that is missing leaves old values to read.
// Atomic operations themselves, and variables of the module, are seen at once.
namespace emulator {
struct Array { char* data; size_t size; };
static std::vector<Array> arrays;
static bool weak;
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

static void start_kernel() { before = told = after = copied(); }
static void end_kernel() { put(after); }

static void enter_block() {
  put(before);
  seen = gathered = fenced = before;
  counted = false;
}
static void leave_block() { write_own(copied(), after); }

static void met() { gathered = copied(); }

// What the threads had written when they met is told from here on; after counting, what others have told is seen.
static void fence() {
  fenced = gathered;
  if (!counted) return;
  Memory own = copied(), now = told;
  write_own(own, now);
  write_own(own, after);
  put(now);
  seen = gathered = fenced = now;
}

static void count() {
  write_own(fenced, told);
  counted = true;
}
}  // namespace emulator

static inline void __threadfence() { emulator::fence(); }
static inline unsigned atomicInc(unsigned* address, unsigned most) {
  emulator::count();
  unsigned old = *address;
  *address = old >= most ? 0 : old + 1;
  return old;
}
