/* Answers CPUID for libraries whose CPUID instructions were replaced by UD0 (0F FF): what the CPU says, less the bits
 * that HIDDEN_CPUID names as "leaf.subleaf.register=mask" (hexadecimal, register a to d), separated by commas.
 * Preloaded: its constructor runs before theirs ask. Any other illegal instruction ends the process as ever. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

static struct { unsigned leaf, subleaf, mask; char reg; } hidden[64];
static int count;

static void answer(int signal_number, siginfo_t *info, void *context)
{
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)regs[REG_RIP];
    if (at[0] != 0x0f || at[1] != 0xff) {
        signal(signal_number, SIG_DFL); /* the instruction runs again, and ends the process */
        if (info->si_code <= 0)
            raise(signal_number); /* as does what a process sent, where none runs again */
        return;
    }
    unsigned leaf = (unsigned)regs[REG_RAX], subleaf = (unsigned)regs[REG_RCX], value[4];
    __cpuid_count(leaf, subleaf, value[0], value[1], value[2], value[3]);
    for (int i = 0; i < count; i++)
        if (hidden[i].leaf == leaf && (hidden[i].subleaf == subleaf || leaf != 7))
            value[hidden[i].reg - 'a'] &= ~hidden[i].mask;
    regs[REG_RAX] = value[0];
    regs[REG_RBX] = value[1];
    regs[REG_RCX] = value[2];
    regs[REG_RDX] = value[3];
    regs[REG_RIP] += 2;
}

__attribute__((constructor(101))) static void install(void)
{
    const char *text = getenv("HIDDEN_CPUID");
    for (; text && *text && count < 64; text += strcspn(text, ","), text += *text == ',') {
        if (sscanf(text, "%x.%x.%c=%x", &hidden[count].leaf, &hidden[count].subleaf, &hidden[count].reg,
                   &hidden[count].mask) != 4 || hidden[count].reg < 'a' || hidden[count].reg > 'd') {
            fprintf(stderr, "HIDDEN_CPUID must be leaf.subleaf.register=mask,..., got %s\n", text);
            exit(2);
        }
        count++;
    }
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, NULL);
}
