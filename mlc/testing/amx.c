/* AMX tiles on an x86-64 CPU that has none: its tile instructions are illegal there, and this answers SIGILL by
 * decoding and executing them. After Intel's "64 and IA-32 Architectures Software Developer's Manual", volume 1,
 * chapter 18, and the instructions' pages of volume 2: palettes 0 and 1, what must be zero, what raises #UD and #GP.
 *
 * What a real CPU would refuse ends the process by the signal that it would end by, after a line that says why. Any
 * other illegal instruction goes to whoever answered before. Addresses without segments, of 64 bits, are decoded: what
 * compilers write. A page fault of a tile's memory access is the process's own.
 *
 * Loaded by LD_PRELOAD with AMX_EMULATED set it is installed at once, and as the kernel does it asks for permission:
 * arch_prctl(ARCH_REQ_XCOMP_PERM, 18) through the C library's syscall(), which AMX_EMULATED=denied refuses. A process
 * that loads it itself calls amx_install.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { NAMES = 8, ROWS = 16, ROW_BYTES = 64 };
enum { LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED, TDPBSSD, TDPBSUD, TDPBUSD,
       TDPBUUD, TDPBF16PS, KINDS };
enum { REQUEST_PERMISSION = 0x1023, XTILEDATA = 18 };

typedef struct {
    int configured;
    uint8_t start_row, rows[NAMES], valid[NAMES];
    uint16_t colsb[NAMES];
    uint8_t data[NAMES][ROWS][ROW_BYTES];
} Tiles;

static __thread Tiles *tiles; /* of this thread; mapped when the first instruction needs it */
static volatile int permitted, denied;
static uint64_t executed[KINDS];
static struct sigaction before;

/* How often each instruction, in the order above, was executed by all threads since amx_reset. */
const uint64_t *amx_counts(void) { return executed; }
void amx_reset(void) { memset(executed, 0, sizeof executed); }

static void say(const char *text)
{
    ssize_t written = write(2, text, strlen(text));
    (void)written;
}

/* End the process as the exception would, when the instruction runs again. */
static void fault(int signal_number, const char *why)
{
    say("AMX emulator: ");
    say(why);
    say("\n");
    signal(signal_number, SIG_DFL);
    if (signal_number != SIGILL) raise(signal_number);
}

#define UNDEFINED(condition, why) do { if (condition) { fault(SIGILL, "#UD: " why); return 0; } } while (0)

static const char *load_configuration(Tiles *t, const uint8_t *from)
{
    uint8_t buffer[64];
    Tiles found;
    memcpy(buffer, from, sizeof buffer);
    memset(&found, 0, sizeof found);
    if (buffer[0] > 1) return "#GP: LDTILECFG of a palette that is neither 0 nor 1";
    if (buffer[0] == 1) {
        found.configured = 1;
        found.start_row = buffer[1];
        for (int i = 2; i < 16; i++) if (buffer[i]) return "#GP: LDTILECFG with reserved bytes 2 to 15 not zero";
        for (int i = 32; i < 48; i++) if (buffer[i]) return "#GP: LDTILECFG with reserved bytes 32 to 47 not zero";
        for (int i = 56; i < 64; i++) if (buffer[i]) return "#GP: LDTILECFG with reserved bytes 56 to 63 not zero";
        for (int n = 0; n < NAMES; n++) {
            found.colsb[n] = (uint16_t)(buffer[16 + 2 * n] | buffer[17 + 2 * n] << 8);
            found.rows[n] = buffer[48 + n];
            if (found.colsb[n] > ROW_BYTES) return "#GP: LDTILECFG with more than 64 bytes in a row";
            if (found.rows[n] > ROWS) return "#GP: LDTILECFG with more than 16 rows";
            if (!found.colsb[n] != !found.rows[n]) return "#GP: LDTILECFG of a tile with rows or columns alone";
            found.valid[n] = found.rows[n] != 0;
        }
    }
    *t = found;
    return NULL;
}

static void store_configuration(const Tiles *t, uint8_t *to)
{
    uint8_t buffer[64] = {0};
    if (t->configured) {
        buffer[0] = 1;
        buffer[1] = t->start_row;
        for (int n = 0; n < NAMES; n++) {
            buffer[16 + 2 * n] = (uint8_t)t->colsb[n];
            buffer[17 + 2 * n] = (uint8_t)(t->colsb[n] >> 8);
            buffer[48 + n] = t->rows[n];
        }
    }
    memcpy(to, buffer, sizeof buffer);
}

static void zero_rows_from(Tiles *t, int name, int row)
{
    for (; row < ROWS; row++) memset(t->data[name][row], 0, ROW_BYTES);
}

static void add_bytes(Tiles *t, int c, int a, int b, int a_signed, int b_signed)
{
    int depth = t->colsb[a] / 4, columns = t->colsb[b] / 4;
    for (int m = 0; m < t->rows[c]; m++) {
        uint32_t sums[ROW_BYTES / 4];
        memcpy(sums, t->data[c][m], sizeof sums);
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < columns; n++)
                for (int i = 0; i < 4; i++) {
                    uint8_t x = t->data[a][m][4 * k + i], y = t->data[b][k][4 * n + i];
                    sums[n] += (uint32_t)((a_signed ? (int8_t)x : x) * (b_signed ? (int8_t)y : y));
                }
        memset(t->data[c][m], 0, ROW_BYTES);
        memcpy(t->data[c][m], sums, t->colsb[c]);
    }
    zero_rows_from(t, c, t->rows[c]);
}

static float widened(const uint8_t *at)
{
    uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* What one rounding makes of a product and a sum: the product is exact in double precision, and a sum of float32 that is
 * rounded to that first is rounded right, since it has twice the bits and two more. Subnormal operands are zero. */
static float fused(float a, float b, float sum)
{
    return (float)((double)a * (double)b + (double)sum);
}

/* Even and odd products are added up apart, fused, then both to the old sum; to nearest, subnormal numbers are zero. */
static void add_bfloats(Tiles *t, int c, int a, int b)
{
    int depth = t->colsb[a] / 4, columns = t->colsb[b] / 4;
    unsigned control = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040);
    for (int m = 0; m < t->rows[c]; m++) {
        float even[ROW_BYTES / 4] = {0}, odd[ROW_BYTES / 4] = {0}, sums[ROW_BYTES / 4];
        memcpy(sums, t->data[c][m], sizeof sums);
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < columns; n++) {
                const uint8_t *x = t->data[a][m] + 4 * k, *y = t->data[b][k] + 4 * n;
                even[n] = fused(widened(x), widened(y), even[n]);
                odd[n] = fused(widened(x + 2), widened(y + 2), odd[n]);
            }
        for (int n = 0; n < columns; n++) sums[n] += even[n] + odd[n];
        memset(t->data[c][m], 0, ROW_BYTES);
        memcpy(t->data[c][m], sums, t->colsb[c]);
    }
    _mm_setcsr(control);
    zero_rows_from(t, c, t->rows[c]);
}

/* Decode what is at the instruction pointer and execute it: its length; 0 where it has been made to fault, -1 where it
 * is none of AMX. */
static int execute(greg_t *regs)
{
    static const int numbered[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    /* by the prefix that VEX implies: none, 66, F3, F2 */
    static const int memory49[4] = {LDTILECFG, STTILECFG, -1, -1}, memory4b[4] = {-1, TILELOADDT1, TILESTORED, TILELOADD};
    static const int dots[4] = {TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD};
    const uint8_t *start = (const uint8_t *)regs[REG_RIP], *at = start;
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) return -1; /* VEX of three bytes, map 0F38 */
    int r = !(at[1] & 0x80), x = !(at[1] & 0x40), b = !(at[1] & 0x20), wide = at[2] >> 7, prefix = at[2] & 3;
    int vvvv = ~at[2] >> 3 & 15, length = at[2] >> 2 & 1, opcode = at[3], modrm = at[4];
    int mod = modrm >> 6, reg = modrm >> 3 & 7, rm = modrm & 7, kind = -1;
    if (opcode == 0x49 && mod != 3 && reg == 0) kind = memory49[prefix];
    else if (opcode == 0x49 && mod == 3 && prefix == 0 && reg == 0 && rm == 0) kind = TILERELEASE;
    else if (opcode == 0x49 && mod == 3 && prefix == 3 && rm == 0) kind = TILEZERO;
    else if (opcode == 0x4b && mod != 3) kind = memory4b[prefix];
    else if (opcode == 0x5c && mod == 3 && prefix == 2) kind = TDPBF16PS;
    else if (opcode == 0x5e && mod == 3) kind = dots[prefix];
    if (kind < 0) return -1;
    UNDEFINED(length || wide, "a tile instruction with VEX.L or VEX.W");
    UNDEFINED(!permitted, "a tile instruction before the process asked the kernel for permission");
    if (tiles == NULL) {
        void *memory = mmap(NULL, sizeof(Tiles), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) { fault(SIGILL, "no memory for tiles"); return 0; }
        tiles = memory;
    }
    Tiles *t = tiles;
    __atomic_fetch_add(&executed[kind], 1, __ATOMIC_RELAXED);
    at += 5;

    if (kind >= TDPBSSD) {
        int c = reg, a = rm, o = vvvv;
        UNDEFINED(!t->configured, "a product without a configuration");
        UNDEFINED(r || b || vvvv > 7, "a product of a tile above 7");
        UNDEFINED(c == a || a == o || c == o, "a product whose tiles are not three");
        UNDEFINED(!t->valid[c] || !t->valid[a] || !t->valid[o], "a product of a tile that is not configured");
        UNDEFINED(t->colsb[c] % 4 || t->colsb[a] % 4 || t->colsb[o] % 4, "a product of rows of no whole words");
        UNDEFINED(t->rows[c] != t->rows[a], "a product whose sums have other rows than its first operand");
        UNDEFINED(t->colsb[c] != t->colsb[o], "a product whose sums have other columns than its second operand");
        UNDEFINED(t->colsb[a] / 4 != t->rows[o], "a product of operands of two depths");
        if (kind == TDPBF16PS) add_bfloats(t, c, a, o);
        else add_bytes(t, c, a, o, kind == TDPBSSD || kind == TDPBSUD, kind == TDPBSSD || kind == TDPBUSD);
        t->start_row = 0;
        return (int)(at - start);
    }
    UNDEFINED(vvvv, "a tile instruction with VEX.vvvv");
    if (kind == TILERELEASE) {
        memset(t, 0, sizeof *t);
        return (int)(at - start);
    }
    if (kind == TILEZERO || kind == TILELOADD || kind == TILELOADDT1 || kind == TILESTORED) {
        UNDEFINED(!t->configured, "a tile's use without a configuration");
        UNDEFINED(r, "a tile above 7");
        UNDEFINED(!t->valid[reg], "the use of a tile that is not configured");
    }
    if (kind == TILEZERO) {
        zero_rows_from(t, reg, 0);
        t->start_row = 0;
        return (int)(at - start);
    }
    int sib = rm == 4, indexed = 0, scale = 0, index = 0, base = rm | b << 3;
    if (sib) {
        scale = *at >> 6;
        index = (*at >> 3 & 7) | x << 3;
        indexed = index != 4;
        rm = *at & 7;
        base = rm | b << 3;
        at++;
    }
    UNDEFINED(!sib && kind >= TILELOADD, "a tile's rows without an index in their address");
    int64_t displacement = 0, stride = indexed ? regs[numbered[index]] << scale : 0;
    if (mod == 1) {
        displacement = (int8_t)*at++;
    } else if (mod == 2 || (mod == 0 && rm == 5)) {
        int32_t word;
        memcpy(&word, at, sizeof word);
        displacement = word;
        at += 4;
    }
    int64_t address = displacement;
    if (!(mod == 0 && rm == 5)) address += regs[numbered[base]];
    else if (!sib) address += (int64_t)at; /* relative to the next instruction */
    if (kind == LDTILECFG || kind == STTILECFG) {
        address += stride;
        if (kind == STTILECFG) {
            store_configuration(t, (uint8_t *)address);
        } else {
            const char *wrong = load_configuration(t, (const uint8_t *)address);
            if (wrong) { fault(SIGSEGV, wrong); return 0; }
        }
        return (int)(at - start);
    }
    int row = t->start_row;
    for (; row < t->rows[reg]; row++) {
        uint8_t *memory = (uint8_t *)(address + row * stride), *mine = t->data[reg][row];
        if (kind == TILESTORED) {
            memcpy(memory, mine, t->colsb[reg]);
        } else {
            memset(mine, 0, ROW_BYTES);
            memcpy(mine, memory, t->colsb[reg]);
        }
    }
    if (kind != TILESTORED) zero_rows_from(t, reg, t->rows[reg]);
    t->start_row = 0;
    return (int)(at - start);
}

static void answer(int signal_number, siginfo_t *info, void *context)
{
    int saved = errno, length = execute(((ucontext_t *)context)->uc_mcontext.gregs);
    errno = saved;
    if (length > 0) {
        ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] += length;
    } else if (length < 0) {
        if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(signal_number, info, context);
        else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal_number);
        else signal(signal_number, SIG_DFL); /* the instruction runs again, and ends the process */
    }
}

/* Answer from now on, for a process that need not ask for permission; whoever answers now is asked next. */
void amx_install(void)
{
    struct sigaction action, now;
    sigaction(SIGILL, NULL, &now);
    permitted = 1;
    if (now.sa_sigaction == answer) return;
    before = now;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, NULL);
}

__attribute__((constructor)) static void preloaded(void)
{
    const char *wanted = getenv("AMX_EMULATED");
    if (wanted == NULL) return;
    denied = strcmp(wanted, "denied") == 0;
    amx_install();
    permitted = 0;
}

/* The kernel's answer to who asks for permission; anything else goes to the kernel. */
long syscall(long number, ...)
{
    long a[6], result;
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_arch_prctl && a[0] == REQUEST_PERMISSION) {
        if (denied || a[1] != XTILEDATA) { errno = denied ? EPERM : EINVAL; return -1; }
        permitted = 1;
        return 0;
    }
    register long r10 __asm__("r10") = a[3];
    register long r8 __asm__("r8") = a[4];
    register long r9 __asm__("r9") = a[5];
    __asm__ volatile("syscall" : "=a"(result)
                     : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) { errno = (int)-result; return -1; }
    return result;
}
