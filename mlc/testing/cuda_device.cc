// NVIDIA's runtime and driver as far as TVM's runtime and mlc call them, on a CPU: memory is this machine's, and a kernel
// runs in the emulator. A module's image is the path of a library that mlc/testing/cuda_device.py has made of the kernels.
//
// A stream does what it was given as late as it may, when somebody waits for it. Meanwhile every other stream takes a
// step before each of its own, but for those that wait for an event: what nothing puts in order is found in the wrong
// one. No stream is put in order with the default one but by events, as those are that PyTorch makes.
//
// Compiled twice: as the driver with -DDRIVER, else as the runtime, which counts what happens.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

using Work = std::function<void()>;
extern "C" int device_start(void* stream, Work* work);
extern "C" char* device_block(const void* address, size_t* size);

#ifdef DRIVER
struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  unsigned count;
};
using Bind = Work* (*)(const unsigned*, const unsigned*, void**);

extern "C" {
int cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "emulated") < 0; }
int cuModuleLoadData(void** module, const void* image) {
  *module = dlopen(static_cast<const char*>(image), RTLD_NOW | RTLD_LOCAL);
  if (!*module) std::fprintf(stderr, "%s\n", dlerror());
  return *module ? 0 : 200;  // CUDA_ERROR_INVALID_IMAGE
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  char bind[512];
  std::snprintf(bind, sizeof bind, "bind_%s", name);
  *function = dlsym(module, bind);
  return *function ? 0 : 500;  // CUDA_ERROR_NOT_FOUND
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuLaunchKernelEx(const Config* c, void* function, void** arguments, void**) {
  return device_start(c->stream, reinterpret_cast<Bind>(function)(c->grid, c->block, arguments));
}
int cuTensorMapEncodeTiled() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR"; return 0; }
int cuGetErrorString(int, const char** text) { *text = "the emulated driver refused"; return 0; }
}

#else
namespace {
constexpr int kInvalid = 1, kOutOfMemory = 2, kIllegalInCapture = 900;
using Graph = std::vector<Work>;
struct Counts { int64_t started, graphs, replayed, copies, held, pageable; } counts;  // `held` bytes
std::string journal;  // what each stream was given, a line each
std::map<char*, size_t> blocks;
struct Queue { std::deque<Work> work; uint64_t taken = 0, done = 0; };
std::map<void*, Queue> queues;
std::set<void*> busy;  // streams that are waited for
struct Event { void* stream; uint64_t place; };
void* capturing;  // the stream whose work goes into `graph`
Graph* graph;
char stream_handles[64];
int streams;
size_t limit = size_t(1) << 30, used;

void note(const char* what, void* stream) {
  journal += std::string(what) + ' ' + std::to_string(reinterpret_cast<uintptr_t>(stream)) + '\n';
}
void later(void* stream, Work work) { queues[stream].work.push_back(std::move(work)), queues[stream].taken++; }
void step(void* stream) {
  Queue& queue = queues[stream];
  Work work = std::move(queue.work.front());
  queue.work.pop_front();
  work(), queue.done++;
}
// Wait until a stream has done as much.
void drain(void* stream, uint64_t place) {
  if (!busy.insert(stream).second) return;
  while (queues[stream].done < place) {
    for (auto& [other, queue] : queues)
      if (!queue.work.empty() && !busy.count(other)) busy.insert(other), step(other), busy.erase(other);
    step(stream);
  }
  busy.erase(stream);
}
void drain(void* stream) { drain(stream, queues[stream].taken); }
void drain_all() { for (auto& each : queues) drain(each.first); }

int allocate(void** pointer, size_t size) {
  if (used + size > limit) return kOutOfMemory;
  *pointer = std::aligned_alloc(256, (size + 255) / 256 * 256 + 256);
  std::memset(*pointer, 0x7f, size);  // what was not written is seen
  blocks[static_cast<char*>(*pointer)] = size;
  used += size;
  return 0;
}
int release(void* pointer) {
  auto found = blocks.find(static_cast<char*>(pointer));
  if (!pointer) return 0;
  if (found == blocks.end() || capturing) return kInvalid;
  drain_all();
  used -= found->second;
  blocks.erase(found);
  std::free(pointer);
  return 0;
}
int copy(void* to, const void* from, size_t size, void* stream) {
  // null is the default stream, which a capture of another must not wait for
  if (capturing && (stream == capturing || !stream)) return kIllegalInCapture;
  counts.copies++;
  note("copy", stream);
  size_t known;
  bool there = device_block(to, &known), here = device_block(from, &known);
  counts.pageable += !there || !here;
  if (here) {
    later(stream, [=] { std::memmove(to, from, size); });
  } else {  // has been read when this returns
    auto kept = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
    later(stream, [=] { std::memcpy(to, kept->data(), size); });
  }
  if (!there) drain(stream);
  return 0;
}
}  // namespace

extern "C" {
// The block of memory that holds an address, and its size; null where none does.
char* device_block(const void* address, size_t* size) {
  auto next = blocks.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (next == blocks.begin()) return nullptr;
  --next;
  *size = next->second;
  return static_cast<const char*>(address) < next->first + next->second ? next->first : nullptr;
}
int device_start(void* stream, Work* work) {
  if (capturing && stream == capturing) graph->push_back(*work);
  else if (capturing) return delete work, kIllegalInCapture;
  else note("kernel", stream), later(stream, *work), counts.started++;
  delete work;
  return 0;
}
void device_counts(int64_t* into) { counts.held = used, std::memcpy(into, &counts, sizeof counts); }
void device_limit(size_t bytes) { limit = bytes; }
// What streams were given since this was asked last; is there until it is asked again.
const char* device_journal() {
  static std::string last;
  last.swap(journal), journal.clear();
  return last.c_str();
}

int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0; }
int cudaSetDevice(int device) { return device ? 101 : 0; }
int cudaGetDeviceProperties(void*, int) { return 0; }
int cudaDeviceGetAttribute(int* value, int which, int) {
  // of cuda.h: threads a block, warp, multiprocessors, the two parts of the compute capability
  static const std::map<int, int> known{{1, 1024}, {10, 32}, {16, 108}, {75, 8}, {76, 0}};
  auto found = known.find(which);
  return *value = found == known.end() ? 0 : found->second, 0;
}
int cudaMemGetInfo(size_t* free, size_t* total) { return *free = limit - used, *total = limit, 0; }
int cudaMalloc(void** pointer, size_t size) { return capturing ? kIllegalInCapture : allocate(pointer, size); }
int cudaMallocHost(void** pointer, size_t size) { return capturing ? kIllegalInCapture : allocate(pointer, size); }
int cudaFree(void* pointer) { return release(pointer); }
int cudaFreeHost(void* pointer) { return release(pointer); }
int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void* stream) { return copy(to, from, size, stream); }
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
  return copy(to, from, size, stream);
}
int cudaStreamCreate(void** stream) { return *stream = stream_handles + streams++ % 64, 0; }
int cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreate(stream); }
int cudaStreamDestroy(void*) { return 0; }
int cudaStreamSynchronize(void* stream) {
  if (capturing && (stream == capturing || !stream)) return kIllegalInCapture;
  note("synchronise", stream);
  return drain(stream), 0;
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  note("wait", stream);
  later(stream, [after = *static_cast<Event*>(event)] { drain(after.stream, after.place); });
  return 0;
}
int cudaStreamBeginCapture(void* stream, int) {
  if (capturing || !stream) return kIllegalInCapture;
  return capturing = stream, graph = new Graph, 0;
}
int cudaStreamEndCapture(void* stream, void** made) {
  if (stream != capturing) return kIllegalInCapture;
  return *made = graph, capturing = nullptr, 0;
}
int cudaGraphInstantiate(void** made, void* from, unsigned long long) {
  return *made = new Graph(*static_cast<Graph*>(from)), 0;
}
int cudaGraphDestroy(void* which) { return delete static_cast<Graph*>(which), 0; }
int cudaGraphExecDestroy(void* which) { return delete static_cast<Graph*>(which), 0; }
int cudaGraphLaunch(void* which, void* stream) {
  counts.graphs++;
  note("graph", stream);
  for (Work& work : *static_cast<Graph*>(which)) later(stream, work), counts.replayed++;
  return 0;
}
int cudaEventCreate(void** event) { return *event = new Event{}, 0; }
int cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
int cudaEventDestroy(void* event) { return delete static_cast<Event*>(event), 0; }
int cudaEventRecord(void* event, void* stream) {
  note("record", stream);
  return *static_cast<Event*>(event) = {stream, queues[stream].taken}, 0;
}
int cudaEventSynchronize(void* event) {
  Event& after = *static_cast<Event*>(event);
  note("await", after.stream);
  return drain(after.stream, after.place), 0;
}
int cudaEventElapsedTime(float* ms, void*, void*) { return *ms = 0, 0; }
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
const char* cudaGetErrorName(int) { return "cudaError"; }
const char* cudaGetErrorString(int code) {
  switch (code) {
    case kOutOfMemory: return "out of memory";
    case kIllegalInCapture: return "operation not permitted when stream is capturing";
    default: return "the emulated runtime refused";
  }
}
}
#endif
