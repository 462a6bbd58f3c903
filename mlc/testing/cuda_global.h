// What blocks of threads see of each other's global memory while a kernel runs: as little as they may.
//
// In a kernel with atomic operations, a block sees memory as it was when the kernel began, and what it wrote itself. What
// else it sees must have been told, by the way that the PTX ISA's memory model asks for: the threads that wrote meet at
// a barrier of their block, a thread of theirs then fences, and only then counts itself by an atomic operation; a thread
// of the reading block counts itself after that, and then fences. A step that is missing leaves old values to read.
// Atomic operations themselves, and variables of the module, are seen at once.
namespace emulator {
struct Array { char* data; size_t size; };
extern std::vector<Array> arrays;
extern bool weak;
void start_kernel();
void end_kernel();
void enter_block();
void leave_block();
void met();
void fence();
void count();
}  // namespace emulator

static inline void __threadfence() { emulator::fence(); }
static inline unsigned atomicInc(unsigned* address, unsigned most) {
  emulator::count();
  unsigned old = *address;
  *address = old >= most ? 0 : old + 1;
  return old;
}
