/* Allocations between inaccessible pages: an access before or behind an array is a segmentation fault at once.
 *
 * Preloaded, this stands in for the allocation of aligned memory, which is how TVM allocates arrays. An array ends where
 * a page does, but for what its alignment leaves, and is filled with a pattern that is no number of interest; freed
 * memory is inaccessible until the address is given again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, MOST = 1 << 16, PATTERN = 0xcd };

struct mapping { void *array, *begin; size_t bytes; };

static struct mapping mappings[MOST];
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static void *allocate(size_t alignment, size_t bytes) {
    size_t taken = whole(bytes ? bytes : 1, alignment), body = whole(taken, PAGE);
    char *begin = mmap(NULL, body + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED) return NULL;
    mprotect(begin + PAGE, body, PROT_READ | PROT_WRITE);
    memset(begin + PAGE, PATTERN, body);
    char *array = begin + PAGE + body - taken;
    pthread_mutex_lock(&lock);
    int fits = count < MOST;
    if (fits) mappings[count++] = (struct mapping){array, begin, body + 2 * PAGE};
    pthread_mutex_unlock(&lock);
    if (fits) return array;
    munmap(begin, body + 2 * PAGE);
    return NULL;
}

int posix_memalign(void **result, size_t alignment, size_t bytes) {
    *result = allocate(alignment, bytes);
    return *result ? 0 : ENOMEM;
}

void *aligned_alloc(size_t alignment, size_t bytes) { return allocate(alignment, bytes); }

void *memalign(size_t alignment, size_t bytes) { return allocate(alignment, bytes); }

void free(void *memory) {
    static void (*next)(void *);
    if (!memory) return;
    pthread_mutex_lock(&lock);
    int i = count - 1;
    while (i >= 0 && mappings[i].array != memory) i--;
    struct mapping found = i < 0 ? (struct mapping){0} : mappings[i];
    if (i >= 0) mappings[i] = mappings[--count];
    pthread_mutex_unlock(&lock);
    if (found.begin) {
        munmap(found.begin, found.bytes);
        return;
    }
    if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    next(memory);
}
