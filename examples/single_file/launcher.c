/*
 * The first thing that runs in dist/afxdpd: a static program that carries the interpreter with all that it needs.
 *
 * pack.py appends one zstd frame for each file, then a table of struct entry, then a struct trailer. Each file is
 * unpacked into a memfd, the first one as descriptor FIRST_FD, the second one as FIRST_FD + 1 and so on; nothing is
 * written to any file system. The second one is the interpreter, and this process becomes it. Its ELF header names
 * /proc/self/fd/FIRST_FD, the dynamic linker, as its interpreter, and the libraries by their descriptors likewise:
 * so nothing in the environment or on the command line changes, and the process keeps its id.
 *
 * The exit status is 127 where this fails, as that of a shell that finds no program.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <zstd.h>

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U /* Linux 6.3 */
#endif

enum { FIRST_FD = 100, MAX_FILES = 400 }; /* pack.py has the same */

/* capget(2); the kernel's own header is not among musl's. */
enum { CAPABILITY_VERSION_3 = 0x20080522 };
struct capability_header {
    uint32_t version;
    int pid;
};
struct capability_sets {
    uint32_t effective, permitted, inheritable;
};

struct entry {
    uint64_t offset; /* of the frame, in this file */
    uint64_t packed;
    uint64_t size;
    char name[40]; /* what /proc/<pid>/maps shows */
};

struct trailer {
    char magic[8];
    uint64_t table; /* its offset in this file */
    uint64_t count;
};

static void fail(const char *what)
{
    fprintf(stderr, "afxdpd: %s: %s\n", what, strerror(errno));
    exit(127);
}

static void fail_plainly(const char *what)
{
    fprintf(stderr, "afxdpd: %s\n", what);
    exit(127);
}

/* Unpacks one file into a memfd that survives execve(2), as descriptor number fd. */
static void unpack(ZSTD_DCtx *context, const char *packed, const struct entry *file, int fd)
{
    int memfd = memfd_create(file->name, MFD_CLOEXEC | MFD_EXEC);
    if (memfd < 0 && errno == EINVAL)
        memfd = memfd_create(file->name, MFD_CLOEXEC);
    if (memfd < 0)
        fail("no memory file can be made (vm.memfd_noexec must not be 2)");
    if (ftruncate(memfd, (off_t)file->size) < 0)
        fail("no memory to unpack into");
    char *memory = mmap(NULL, file->size, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (memory == MAP_FAILED)
        fail("no memory to unpack into");
    if (ZSTD_decompressDCtx(context, memory, file->size, packed + file->offset, file->packed) != file->size)
        fail_plainly("the file is damaged");
    munmap(memory, file->size);
    fchmod(memfd, 0555); /* the kernel asks for the right to execute it */
    if (dup2(memfd, fd) < 0)
        fail("too low a limit of open files");
    close(memfd);
}

/* Where a user other than root has capabilities, from the file or from whoever started it, the interpreter gets them. */
static void keep_capabilities(void)
{
    struct capability_header header = {.version = CAPABILITY_VERSION_3};
    struct capability_sets sets[2];
    if (geteuid() == 0 || syscall(SYS_capget, &header, sets) < 0)
        return;
    for (int word = 0; word < 2; word++)
        sets[word].inheritable |= sets[word].permitted;
    if (syscall(SYS_capset, &header, sets) < 0)
        return;
    for (unsigned int capability = 0; capability < 64; capability++)
        if (sets[capability / 32].permitted >> capability % 32 & 1)
            prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0);
}

static void allow_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < FIRST_FD + MAX_FILES) {
        limit.rlim_cur = limit.rlim_max < FIRST_FD + MAX_FILES ? limit.rlim_max : FIRST_FD + MAX_FILES;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

int main(int argc, char **argv, char **environ)
{
    (void)argc;
    int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (self < 0)
        fail("/proc/self/exe (is /proc mounted?)");
    struct stat status;
    if (fstat(self, &status) < 0)
        fail("/proc/self/exe");
    uint64_t size = (uint64_t)status.st_size;
    const char *packed = mmap(NULL, size, PROT_READ, MAP_PRIVATE, self, 0);
    if (packed == MAP_FAILED)
        fail("/proc/self/exe");
    struct trailer trailer;
    memcpy(&trailer, packed + size - sizeof trailer, sizeof trailer);
    if (memcmp(trailer.magic, "afxdpd-1", sizeof trailer.magic) != 0 || trailer.count < 2 ||
        trailer.count > MAX_FILES || trailer.table > size ||
        size - trailer.table != trailer.count * sizeof(struct entry) + sizeof trailer)
        fail_plainly("the file is not complete");

    allow_files();
    ZSTD_DCtx *context = ZSTD_createDCtx();
    if (context == NULL)
        fail("no memory to unpack with");
    for (uint64_t number = 0; number < trailer.count; number++) {
        struct entry file;
        memcpy(&file, packed + trailer.table + number * sizeof file, sizeof file);
        if (file.offset > trailer.table || file.packed > trailer.table - file.offset)
            fail_plainly("the file is damaged");
        unpack(context, packed, &file, FIRST_FD + (int)number);
    }
    keep_capabilities();
    char interpreter[32];
    snprintf(interpreter, sizeof interpreter, "/proc/self/fd/%d", FIRST_FD + 1);
    execve(interpreter, argv, environ);
    fail("the interpreter cannot be started");
}
