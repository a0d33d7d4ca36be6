/* What a process reads, seen at the C library: the preloaded library of `penstock trace`.
 *
 * Calls of the C library that read, open, map, write or look up files, and those that receive from
 * connections, become rows of the trace (schema.py). Each thread writes into mapped files of its
 * own, so a killed process loses nothing and no row takes a lock. Names go into a mapped file of
 * the process. No file descriptor stays open: a program that closes all of them does no harm.
 *
 * Rules that keep the traced program safe:
 * - Every wrapper keeps `errno` and calls the real function exactly once.
 * - `self.busy` stops recursion and recording from a signal handler that interrupts a recording.
 * - Blocks of mapped files are allocated before they are written: a full disk drops rows.
 * - Memory comes from mmap: a handler that interrupts malloc does not enter it again.
 * - The table of descriptors is a cache. An entry that is reset is found out again, so what a child
 *   of vfork closes does no harm to its parent.
 * - Real functions are looked up before main: dlsym takes the loader's lock, and a thread that a
 *   library's constructor waits for must not need it.
 * - What a child of fork inherits makes sense at every moment: another thread may be in the midst of
 *   a change.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#undef open
#undef open64
#undef openat
#undef openat64
#undef fopen
#undef fopen64
#undef stat
#undef stat64
#undef lstat
#undef lstat64
#undef fstatat
#undef fstatat64

enum { READ = 30, OPEN = 31, WRITE = 32, METADATA = 33, MAP = 34, NUM_KINDS = 64 };
enum { FAILED = 2, NATIVE = 8, SOCKET = 16 };

#define PATH_BYTES 4096
#define FOLDER_BYTES 1024 /* launch.py refuses longer ones. Signal handlers have little stack. */
#define NUM_DESCRIPTORS 65536
#define NUM_NAMES (1u << 20)
#define NUM_SLOTS_FIRST 4096u
#define NAMES_BYTES (64u << 20)
#define HEAD_BYTES 4096
#define NAMES_STEP (256u << 10)
#define SEGMENT_BYTES (64u << 10)
#define SEGMENT_DOUBLINGS 6
#define ROWS_BYTES_MAX (256ll << 20)
#define ROW_BYTES_MAX (16ll << 20)  /* A row that is extended ends here. */
#define EXTEND_GAP_NS 1000000000ll
#define CLOCK_ROUNDS 8
#define RETRY_NS 1000000000ll /* A disk that had no room is asked again after a second. */
#define ZEROS_BYTES 4096

struct row {
    int64_t start, duration, cpu, wait, lock, offset, size, step;
    int32_t count, epoch;
    uint32_t object, source;
    uint16_t kind, flags, attempt, spare;
};
_Static_assert(sizeof(struct row) == 88, "the row of schema.py");

struct head { /* The first page of a process's file; native.py reads it. */
    char magic[8];
    uint32_t version, rank, pid, parent;
    int64_t perf_ns, time_ns, names_bytes;
    uint64_t dropped[NUM_KINDS];
    char boot[64], host[64];
};

struct segment_head { /* recorder.SEGMENT_HEAD */
    char magic[8];
    uint64_t number, first, count;
};

enum { UNKNOWN = 0, IGNORED, A_FILE, A_SOCKET };

struct entry {
    uint32_t state, object;
    int64_t position;   /* Of a file: where the next read() begins; -1: ask the kernel. */
    int64_t sent_ns;    /* Of a connection: when the question was sent that awaits an answer. */
    struct row *row;    /* The row that may be extended. */
    uint32_t generation, kind;
};

static __thread struct {
    uint32_t busy, generation, num_segments;
    uint64_t count, capacity;
    struct segment_head *segment;
    int64_t lock_ns;
} self __attribute__((tls_model("initial-exec")));

static char folder[FOLDER_BYTES];
static size_t folder_bytes;
static uint32_t rank_number;
static uint32_t generation = 1;  /* Counts forks: what was mapped before is the parent's. */
static struct entry table[NUM_DESCRIPTORS];

static struct head *head;  /* NULL until the first row of this process. */
static char stem[FOLDER_BYTES + 96];
static int64_t retry_ns;   /* Files could not be made: nothing more is recorded until then. */
static int64_t rows_bytes;
static uint32_t num_files;

static struct { const char *text; uint64_t hash; uint32_t size, generation; } names[NUM_NAMES];
static uint32_t num_names = 1;
static struct slots {
    uint32_t num, number[];
} *slots; /* A hash table of numbers; it grows, for every page of it costs a fault. */
static char *arena;
static size_t arena_left;
static int64_t names_allocated;

/* Guards names, the arena, the head and the making of files. A spin lock, since it is held for
 * microseconds, and because a child of fork can simply set it free. */
static int lock_word;

static void lock(void) {
    while (__atomic_exchange_n(&lock_word, 1, __ATOMIC_ACQUIRE))
        syscall(SYS_sched_yield);
}

static void unlock(void) { __atomic_store_n(&lock_word, 0, __ATOMIC_RELEASE); }

static int64_t clock_of(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int64_t now(void) { return clock_of(CLOCK_MONOTONIC); }

/* ---- files of the trace ------------------------------------------------------------------- */

static void *raw_mmap(size_t size, int flags, int fd) {
    void *at = (void *)syscall(SYS_mmap, NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* Allocate blocks, so that writing through the mapping cannot end the process with SIGBUS. */
static int allocate(int fd, int64_t from, int64_t size) {
    static const char zeros[ZEROS_BYTES];
    if (syscall(SYS_fallocate, fd, 0, from, size) == 0)
        return 1;
    if (errno != EOPNOTSUPP && errno != ENOSYS)
        return 0;
    for (int64_t at = from; at < from + size; at += ZEROS_BYTES)
        if (syscall(SYS_pwrite64, fd, zeros, sizeof zeros, at) != sizeof zeros)
            return 0;
    return 1;
}

static void *mapped_file(const char *path, int64_t size, int64_t allocated) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return NULL;
    void *at = NULL;
    if (allocate(fd, 0, allocated) && syscall(SYS_ftruncate, fd, size) == 0)
        at = raw_mmap(size, MAP_SHARED, fd);
    syscall(SYS_close, fd);
    if (!at)
        syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    return at;
}

static void read_text(const char *path, char *out, size_t size) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    ssize_t n = fd < 0 ? 0 : syscall(SYS_read, fd, out, size - 1);
    if (fd >= 0)
        syscall(SYS_close, fd);
    out[n > 0 ? n : 0] = 0;
    out[strcspn(out, "\n")] = 0;
}

/* Make the file of this process; the lock is held. */
static void make_head(void) {
    uint32_t noise = 0;
    uint32_t pid = (uint32_t)syscall(SYS_getpid);
    syscall(SYS_getrandom, &noise, sizeof noise, 0);
    snprintf(stem, sizeof stem, "%s/%05u-native-%u-%08x", folder, rank_number, pid, noise);
    char path[sizeof stem + 16];
    snprintf(path, sizeof path, "%s.native", stem);
    names_allocated = NAMES_STEP;
    struct head *made = mapped_file(path, NAMES_BYTES, names_allocated);
    if (!made) {
        retry_ns = now() + RETRY_NS;
        return;
    }
    made->version = 1;
    made->rank = rank_number;
    made->pid = pid;
    made->parent = (uint32_t)syscall(SYS_getppid);
    /* The thread may lose its core between the two clocks: the pair read fastest is kept. */
    for (int64_t i = 0, shortest = INT64_MAX; i < CLOCK_ROUNDS; i++) {
        int64_t before = now(), day = clock_of(CLOCK_REALTIME), took = now() - before;
        if (took < shortest) {
            shortest = took;
            made->perf_ns = before + took / 2;
            made->time_ns = day;
        }
    }
    read_text("/proc/sys/kernel/random/boot_id", made->boot, sizeof made->boot);
    read_text("/proc/sys/kernel/hostname", made->host, sizeof made->host);
    rows_bytes = num_files = 0;
    memcpy(made->magic, "PsTnatv1", 8);
    __atomic_store_n(&head, made, __ATOMIC_RELEASE);
}

/* Begin a file for rows of this thread; false: rows are dropped from here on. */
static int new_segment(void) {
    int64_t size = (int64_t)SEGMENT_BYTES
                   << (self.num_segments < SEGMENT_DOUBLINGS ? self.num_segments : SEGMENT_DOUBLINGS);
    char path[sizeof stem + 32];
    self.segment = NULL;
    self.capacity = self.count = 0;
    lock();
    int64_t is_late = now() >= retry_ns;
    if (!head && is_late)
        make_head();
    int may = head && is_late && rows_bytes + size <= ROWS_BYTES_MAX;
    if (may) {
        rows_bytes += size;
        snprintf(path, sizeof path, "%s.%u.rows", stem, num_files++);
    }
    unlock();
    if (!may)
        return 0;
    struct segment_head *made = mapped_file(path, size, size);
    if (!made) {
        lock();
        rows_bytes -= size;
        retry_ns = now() + RETRY_NS;
        unlock();
        return 0;
    }
    made->number = (uint64_t)syscall(SYS_gettid);
    memcpy(made->magic, "PsTrows1", 8);
    self.segment = made;
    self.capacity = (size - sizeof *made) / sizeof(struct row);
    self.num_segments++;
    return 1;
}

static void write_name(uint32_t number);

static struct row *add_row(int kind, struct entry *entry, int64_t start, int64_t end) {
    if (self.generation != generation) { /* A child of fork begins files of its own. */
        self.generation = generation;
        self.capacity = self.count = self.num_segments = 0;
    }
    if (self.count == self.capacity && !new_segment()) {
        if (head)
            __atomic_fetch_add(&head->dropped[kind], 1, __ATOMIC_RELAXED);
        return NULL;
    }
    if (names[entry->object].generation != generation)
        write_name(entry->object);
    struct row *row = (struct row *)(self.segment + 1) + self.count;
    memset(row, 0, sizeof *row);
    row->start = start;
    row->duration = end - start;
    row->offset = row->step = row->epoch = -1;
    row->object = entry->object;
    row->kind = (uint16_t)kind;
    row->flags = NATIVE;
    row->count = 1;
    return row;
}

/* After the row is whole: whoever reads the file of a killed process sees whole rows only. */
static void commit(struct row *row) {
    if (row)
        __atomic_store_n(&self.segment->count, ++self.count, __ATOMIC_RELEASE);
}

/* ---- names -------------------------------------------------------------------------------- */

static char *kept(const char *text, size_t size) {
    if (size > arena_left) {
        arena_left = 0;
        __atomic_store_n(&arena, raw_mmap(1 << 20, MAP_PRIVATE | MAP_ANONYMOUS, -1), __ATOMIC_RELEASE);
        if (!arena)
            return NULL;
        __atomic_store_n(&arena_left, 1 << 20, __ATOMIC_RELEASE);
    }
    char *out = arena;
    memcpy(out, text, size);
    /* In this order: a child of fork may begin between the two. */
    __atomic_store_n(&arena_left, arena_left - size, __ATOMIC_RELEASE);
    __atomic_store_n(&arena, out + size, __ATOMIC_RELEASE);
    return out;
}

/* Double the table of names; the lock is held. */
static int grow_slots(void) {
    struct slots *old = slots;
    uint32_t more = old ? old->num * 2 : NUM_SLOTS_FIRST;
    struct slots *made =
        raw_mmap(sizeof *made + more * sizeof *made->number, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!made)
        return 0;
    made->num = more;
    for (uint32_t number = 1; number < num_names; number++) {
        uint32_t slot = (uint32_t)(names[number].hash >> 20) & (more - 1);
        while (made->number[slot])
            slot = (slot + 1) & (more - 1);
        made->number[slot] = number;
    }
    /* At once, size and all, and before the old one goes: a child of fork may begin here. */
    __atomic_store_n(&slots, made, __ATOMIC_RELEASE);
    if (old)
        syscall(SYS_munmap, old, sizeof *old + old->num * sizeof *old->number);
    return 1;
}

static uint32_t name_of(const char *text) {
    size_t size = strnlen(text, PATH_BYTES - 1);
    uint64_t hash = 1469598103934665603ull;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ (unsigned char)text[i]) * 1099511628211ull;
    lock();
    if ((!slots || num_names * 2 > slots->num) && !grow_slots()) {
        unlock();
        return 0;
    }
    uint32_t slot = (uint32_t)(hash >> 20) & (slots->num - 1), number;
    while ((number = slots->number[slot])) {
        if (names[number].hash == hash && names[number].size == size &&
            memcmp(names[number].text, text, size) == 0)
            break;
        slot = (slot + 1) & (slots->num - 1);
    }
    if (!number && num_names < NUM_NAMES) {
        const char *copy = kept(text, size);
        if (copy) {
            number = num_names;
            names[number].text = copy;
            names[number].hash = hash;
            names[number].size = (uint32_t)size;
            __atomic_store_n(&num_names, number + 1, __ATOMIC_RELEASE);
            slots->number[slot] = number;
        }
    }
    unlock();
    return number; /* 0, the empty name, when there are too many. */
}

static int grow_names(int64_t needed) {
    char path[sizeof stem + 16];
    if (needed > NAMES_BYTES)
        return 0;
    if (needed <= names_allocated)
        return 1;
    snprintf(path, sizeof path, "%s.native", stem);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    int ok = fd >= 0 && allocate(fd, names_allocated, NAMES_STEP);
    if (fd >= 0)
        syscall(SYS_close, fd);
    if (ok)
        names_allocated += NAMES_STEP;
    return ok;
}

static void write_name(uint32_t number) {
    lock();
    if (head && number && names[number].generation != generation) {
        uint32_t size = names[number].size, pair[2] = {number, size};
        int64_t end = HEAD_BYTES + head->names_bytes + (int64_t)sizeof pair + size;
        if (grow_names(end)) {
            char *at = (char *)head + HEAD_BYTES + head->names_bytes;
            memcpy(at, pair, sizeof pair);
            memcpy(at + sizeof pair, names[number].text, size);
            __atomic_store_n(&head->names_bytes, end - HEAD_BYTES, __ATOMIC_RELEASE);
        }
        names[number].generation = generation;
    }
    unlock();
}

/* ---- descriptors -------------------------------------------------------------------------- */

static int has_prefix(const char *path, const char *prefix) {
    return strncmp(path, prefix, strlen(prefix)) == 0;
}

static int has_suffix(const char *path, size_t size, const char *suffix) {
    size_t n = strlen(suffix);
    return size >= n && memcmp(path + size - n, suffix, n) == 0;
}

/* Files of the interpreter, the system and the trace itself: no data of a training job. */
static int is_noise(const char *path) {
    static const char *const PREFIXES[] = {"/proc/", "/sys/", "/etc/", "/usr/lib", "/usr/share/",
                                           "/usr/local/lib/", "/usr/include/", "/lib/", "/lib64/", "/var/lib/",
                                           "/run/", "/dev/shm/torch_", "/dev/shm/sem.",
                                           "/dev/shm/psm_", "/dev/shm/nccl-", "/memfd:"};
    static const char *const SUFFIXES[] = {".py", ".pyc", ".so", ".pth", ".pyi", "pyvenv.cfg"};
    size_t size = strlen(path);
    if (has_prefix(path, "/dev/") && !has_prefix(path, "/dev/shm/"))
        return 1;
    for (size_t i = 0; i < sizeof PREFIXES / sizeof *PREFIXES; i++)
        if (has_prefix(path, PREFIXES[i]))
            return 1;
    for (size_t i = 0; i < sizeof SUFFIXES / sizeof *SUFFIXES; i++)
        /* A checkpoint may be called model.pth: the site's files lie beside packages. */
        if (has_suffix(path, size, SUFFIXES[i]) && strcmp(SUFFIXES[i], ".pth") != 0)
            return 1;
    return (folder_bytes && strncmp(path, folder, folder_bytes) == 0 &&
            (path[folder_bytes] == '/' || !path[folder_bytes])) ||
           strstr(path, "/site-packages") || strstr(path, "/lib/python3") || strstr(path, ".so.");
}

static int link_of(int fd, char *out) {
    char link[48];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_BYTES - 1);
    out[n > 0 ? n : 0] = 0;
    return n > 0;
}

static void reset(int fd) {
    if (fd >= 0 && fd < NUM_DESCRIPTORS && table[fd].state != UNKNOWN)
        memset(&table[fd], 0, sizeof table[fd]);
}

/* Connections that torch makes carry gradients between ranks, not data of the job. */
static int is_torch(void *caller) {
    Dl_info about;
    return dladdr(caller, &about) && about.dli_fname &&
           (strstr(about.dli_fname, "/libtorch") || strstr(about.dli_fname, "nccl"));
}

/* Take note of a connection that this process makes. Those that it accepts are not recorded. */
static void connected(int fd, const struct sockaddr *peer) {
    char host[INET6_ADDRSTRLEN] = "", text[INET6_ADDRSTRLEN + 24];
    struct entry *entry = &table[fd];
    memset(entry, 0, sizeof *entry);
    if (peer->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const void *)peer;
        inet_ntop(AF_INET, &four->sin_addr, host, sizeof host);
        snprintf(text, sizeof text, "tcp://%s:%d", host, ntohs(four->sin_port));
    } else {
        const struct sockaddr_in6 *six = (const void *)peer;
        inet_ntop(AF_INET6, &six->sin6_addr, host, sizeof host);
        snprintf(text, sizeof text, "tcp://[%s]:%d", host, ntohs(six->sin6_port));
    }
    entry->object = name_of(text);
    entry->state = A_SOCKET;
}

/* Find out what a descriptor is that was not seen when it was made. */
static void resolve(int fd, struct entry *entry) {
    struct stat about;
    char path[PATH_BYTES];
    entry->state = IGNORED;
    if (syscall(SYS_fstat, fd, &about) != 0)
        return;
    if (S_ISREG(about.st_mode) && link_of(fd, path) && !is_noise(path)) {
        entry->object = name_of(path);
        entry->position = -1;
        entry->state = A_FILE;
    }
}

/* Return the entry of a descriptor whose use is recorded, else NULL. */
static struct entry *watched(int fd) {
    if (!folder_bytes || self.busy || fd < 0 || fd >= NUM_DESCRIPTORS)
        return NULL;
    struct entry *entry = &table[fd];
    if (entry->state == UNKNOWN) {
        int kept_errno = errno;
        self.busy = 1;
        resolve(fd, entry);
        self.busy = 0;
        errno = kept_errno;
    }
    return entry->state >= A_FILE ? entry : NULL;
}

static int64_t position_of(int fd, struct entry *entry) {
    if (entry->position < 0)
        entry->position = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    return entry->position;
}

static void record_open(int fd, struct entry *entry, const char *path, int64_t start, int64_t end) {
    struct stat about;
    if (is_noise(path) || syscall(SYS_fstat, fd, &about) != 0 || !S_ISREG(about.st_mode))
        return;
    entry->object = name_of(path);
    struct row *row = add_row(OPEN, entry, start, end);
    if (row)
        row->size = about.st_size;
    commit(row);
    entry->state = A_FILE;
}

/* A function of its own: its buffer is as large as some stacks of signal handlers. */
__attribute__((noinline)) static void opened_relative(int fd, struct entry *entry, int64_t start,
                                                      int64_t end) {
    char path[PATH_BYTES];
    if (link_of(fd, path))
        record_open(fd, entry, path, start, end);
}

/* Take note of a file that was opened; `start` is when. */
static void opened(int fd, const char *path, int64_t start) {
    if (!folder_bytes || fd < 0 || fd >= NUM_DESCRIPTORS || self.busy)
        return;
    int kept_errno = errno;
    int64_t end = now();
    struct entry *entry = &table[fd];
    self.busy = 1;
    memset(entry, 0, sizeof *entry);
    entry->state = IGNORED;
    if (path && path[0] != '/')
        opened_relative(fd, entry, start, end);
    else if (path)
        record_open(fd, entry, path, start, end);
    self.busy = 0;
    errno = kept_errno;
}

/* ---- rows --------------------------------------------------------------------------------- */

static int may_extend(struct entry *entry, int kind, int64_t at, int64_t start) {
    struct row *row = entry->row;
    return row && entry->generation == generation && entry->kind == (uint32_t)kind &&
           row->size < ROW_BYTES_MAX && (at < 0 || row->offset + row->size == at) &&
           start - (row->start + row->duration) < EXTEND_GAP_NS;
}

static void extend(struct entry *entry, int64_t start, int64_t end, int64_t size) {
    struct row *row = entry->row;
    row->duration = end - row->start;
    /* Two threads may write to one connection. */
    __atomic_fetch_add(&row->wait, end - start, __ATOMIC_RELAXED);
    __atomic_fetch_add(&row->size, size, __ATOMIC_RELAXED);
    __atomic_fetch_add(&row->count, 1, __ATOMIC_RELAXED);
}

static void keep_open(struct entry *entry, struct row *row, int kind) {
    entry->row = row;
    entry->generation = generation;
    entry->kind = (uint32_t)kind;
}

/* An answer of a connection: one row from the question to the last byte before the next one. */
static void received(struct entry *entry, int64_t start, int64_t end, ssize_t size) {
    if (size <= 0)
        return;
    if (!entry->sent_ns && may_extend(entry, READ, -1, start)) {
        extend(entry, start, end, size);
        return;
    }
    struct row *row = add_row(READ, entry, entry->sent_ns ? entry->sent_ns : start, end);
    entry->sent_ns = 0;
    if (row) {
        row->flags |= SOCKET;
        row->size = size;
        row->wait = end - start;
    }
    commit(row);
    keep_open(entry, row, READ);
}

static void sent(struct entry *entry, int64_t start) {
    if (!entry->sent_ns)
        entry->sent_ns = start;
}

static void read_file(struct entry *entry, int64_t start, int64_t end, int64_t at, ssize_t size) {
    if (size == 0 || (size < 0 && (errno == EAGAIN || errno == EINTR)))
        return; /* The read by which a program finds the end of a file is no request. */
    struct row *row = add_row(READ, entry, start, end);
    if (row) {
        row->offset = at;
        row->size = size > 0 ? size : 0;
        row->flags |= size < 0 ? FAILED : 0;
    }
    commit(row);
}

enum { AT_POSITION = -2 };

static void after_read(int fd, struct entry *entry, int64_t start, int64_t at, ssize_t size) {
    int kept_errno = errno;
    int64_t end = now();
    self.busy = 1;
    if (entry->state == A_SOCKET) {
        received(entry, start, end, size);
    } else {
        if (at == AT_POSITION) {
            /* An unknown position is asked for after the call: the bytes are already counted. */
            int is_known = entry->position >= 0;
            at = position_of(fd, entry) - (is_known || size < 0 ? 0 : size);
            if (is_known && size > 0)
                entry->position += size;
        }
        read_file(entry, start, end, at, size);
    }
    self.busy = 0;
    errno = kept_errno;
}

static void after_write(int fd, struct entry *entry, int64_t start, int64_t at, ssize_t size) {
    int kept_errno = errno;
    int64_t end = now();
    self.busy = 1;
    if (entry->state == A_SOCKET) {
        sent(entry, start);
    } else if (size >= 0) {
        if (at == AT_POSITION) {
            int is_known = entry->position >= 0;
            at = position_of(fd, entry) - (is_known ? 0 : size);
            if (is_known)
                entry->position += size;
        }
        if (may_extend(entry, WRITE, at, start)) {
            extend(entry, start, end, size);
        } else {
            struct row *row = add_row(WRITE, entry, start, end);
            if (row) {
                row->offset = at;
                row->size = size;
                row->wait = end - start;
            }
            commit(row);
            keep_open(entry, row, WRITE);
        }
    }
    self.busy = 0;
    errno = kept_errno;
}

/* The interpreter looks at folders again and again while it imports: files are what counts. */
static void looked_up(const char *path, int64_t start, int is_failed, int is_folder) {
    if (is_folder || !folder_bytes || self.busy || !path || path[0] != '/' || is_noise(path))
        return;
    int kept_errno = errno;
    int64_t end = now();
    self.busy = 1;
    struct entry entry = {.object = name_of(path)};
    struct row *row = add_row(METADATA, &entry, start, end);
    if (row)
        row->flags |= is_failed ? FAILED : 0;
    commit(row);
    self.busy = 0;
    errno = kept_errno;
}

/* ---- the C library ------------------------------------------------------------------------ */

#define EXPORT __attribute__((visibility("default")))
struct wrapped {
    const char *name;
    void **real;
};

/* Every wrapper notes which function it needs; `begin` looks them all up. What is called earlier, by
 * another library's constructor, looks up its own. */
#define REAL(result, name, ...)                                     \
    static result (*real)(__VA_ARGS__);                             \
    static const struct wrapped wrapped                             \
        __attribute__((section("penstock_wrapped"), used)) = {name, (void **)&real}; \
    if (!real)                                                      \
        look_up(&wrapped)

extern const struct wrapped __start_penstock_wrapped[], __stop_penstock_wrapped[];

static void look_up(const struct wrapped *wanted) {
    __atomic_store_n(wanted->real, dlsym(RTLD_NEXT, wanted->name), __ATOMIC_RELEASE);
}

#define MODE(flags)                                                 \
    mode_t mode = 0;                                                \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                        \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode = va_arg(rest, mode_t);                                \
        va_end(rest);                                               \
    }

#define WRAP_OPEN(name)                                             \
    EXPORT int name(const char *path, int flags, ...) {             \
        REAL(int, #name, const char *, int, ...);                   \
        MODE(flags)                                                 \
        int64_t start = now();                                      \
        int fd = real(path, flags, mode);                           \
        opened(fd, path, start);                                    \
        return fd;                                                  \
    }
WRAP_OPEN(open)
WRAP_OPEN(open64)

#define WRAP_OPENAT(name)                                           \
    EXPORT int name(int at, const char *path, int flags, ...) {     \
        REAL(int, #name, int, const char *, int, ...);              \
        MODE(flags)                                                 \
        int64_t start = now();                                      \
        int fd = real(at, path, flags, mode);                       \
        opened(fd, path, start);                                    \
        return fd;                                                  \
    }
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)

/* Checked variants, which programs call that were compiled with _FORTIFY_SOURCE. */
#define WRAP_OPEN_2(name)                                           \
    EXPORT int name(const char *path, int flags) {                  \
        REAL(int, #name, const char *, int);                        \
        int64_t start = now();                                      \
        int fd = real(path, flags);                                 \
        opened(fd, path, start);                                    \
        return fd;                                                  \
    }
WRAP_OPEN_2(__open_2)
WRAP_OPEN_2(__open64_2)

#define WRAP_FOPEN(name)                                            \
    EXPORT FILE *name(const char *path, const char *mode) {         \
        REAL(FILE *, #name, const char *, const char *);            \
        int64_t start = now();                                      \
        FILE *file = real(path, mode);                              \
        if (file)                                                   \
            opened(fileno(file), path, start);                      \
        return file;                                                \
    }
WRAP_FOPEN(fopen)
WRAP_FOPEN(fopen64)

EXPORT int fclose(FILE *file) {
    REAL(int, "fclose", FILE *);
    if (file)
        reset(fileno(file));
    return real(file);
}

EXPORT int close(int fd) {
    REAL(int, "close", int);
    reset(fd);
    return real(fd);
}

EXPORT int closedir(DIR *folder) {
    REAL(int, "closedir", DIR *);
    DIR *volatile given = folder; /* The compiler takes it for granted that there is one. */
    if (given)
        reset(dirfd(given));
    return real(given);
}

static void reset_range(unsigned from, unsigned to) {
    for (unsigned fd = from; fd <= to && fd < NUM_DESCRIPTORS; fd++)
        reset((int)fd);
}

EXPORT int close_range(unsigned from, unsigned to, int flags) {
    REAL(int, "close_range", unsigned, unsigned, int);
    reset_range(from, to);
    if (real)
        return real(from, to, flags);
    errno = ENOSYS; /* A C library that does not have it. */
    return -1;
}

EXPORT void closefrom(int from) {
    REAL(void, "closefrom", int);
    reset_range(from < 0 ? 0 : (unsigned)from, UINT32_MAX);
    if (real)
        real(from);
}

/* What was closed behind our back leaves an entry, and the number comes back here. */
EXPORT int dup(int from) {
    REAL(int, "dup", int);
    int fd = real(from);
    reset(fd);
    return fd;
}

EXPORT int dup2(int from, int to) {
    REAL(int, "dup2", int, int);
    reset(to);
    return real(from, to);
}

EXPORT int dup3(int from, int to, int flags) {
    REAL(int, "dup3", int, int, int);
    reset(to);
    return real(from, to, flags);
}

#define WRAP_LSEEK(name)                                            \
    EXPORT off64_t name(int fd, off64_t offset, int whence) {       \
        REAL(off64_t, #name, int, off64_t, int);                    \
        off64_t at = real(fd, offset, whence);                      \
        if (fd >= 0 && fd < NUM_DESCRIPTORS && table[fd].state == A_FILE && at >= 0) \
            table[fd].position = at;                                \
        return at;                                                  \
    }
WRAP_LSEEK(lseek)
WRAP_LSEEK(lseek64)

/* Around a call that reads: `call` is made once, with or without a row. */
#define AROUND_READ(type, fd, at, call)                             \
    struct entry *entry = watched(fd);                              \
    if (!entry)                                                     \
        return call;                                                \
    int64_t start = now();                                          \
    type size = call;                                               \
    after_read(fd, entry, start, at, size);                         \
    return size

#define AROUND_WRITE(fd, at, call)                                  \
    struct entry *entry = watched(fd);                              \
    if (!entry)                                                     \
        return call;                                                \
    int64_t start = now();                                          \
    ssize_t size = call;                                            \
    after_write(fd, entry, start, at, size);                        \
    return size

EXPORT ssize_t read(int fd, void *to, size_t room) {
    REAL(ssize_t, "read", int, void *, size_t);
    AROUND_READ(ssize_t, fd, AT_POSITION, real(fd, to, room));
}

EXPORT ssize_t __read_chk(int fd, void *to, size_t room, size_t limit) {
    REAL(ssize_t, "__read_chk", int, void *, size_t, size_t);
    AROUND_READ(ssize_t, fd, AT_POSITION, real(fd, to, room, limit));
}

#define WRAP_PREAD(name)                                            \
    EXPORT ssize_t name(int fd, void *to, size_t room, off64_t at) { \
        REAL(ssize_t, #name, int, void *, size_t, off64_t);         \
        AROUND_READ(ssize_t, fd, at, real(fd, to, room, at));       \
    }
WRAP_PREAD(pread)
WRAP_PREAD(pread64)

#define WRAP_PREAD_CHK(name)                                        \
    EXPORT ssize_t name(int fd, void *to, size_t room, off64_t at, size_t limit) { \
        REAL(ssize_t, #name, int, void *, size_t, off64_t, size_t); \
        AROUND_READ(ssize_t, fd, at, real(fd, to, room, at, limit)); \
    }
WRAP_PREAD_CHK(__pread_chk)
WRAP_PREAD_CHK(__pread64_chk)

EXPORT ssize_t readv(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "readv", int, const struct iovec *, int);
    AROUND_READ(ssize_t, fd, AT_POSITION, real(fd, parts, count));
}

#define WRAP_PREADV(name)                                           \
    EXPORT ssize_t name(int fd, const struct iovec *parts, int count, off64_t at) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, off64_t); \
        AROUND_READ(ssize_t, fd, at, real(fd, parts, count, at));   \
    }
WRAP_PREADV(preadv)
WRAP_PREADV(preadv64)

#define WRAP_PREADV2(name)                                          \
    EXPORT ssize_t name(int fd, const struct iovec *parts, int count, off64_t at, int flags) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, off64_t, int); \
        AROUND_READ(ssize_t, fd, at < 0 ? AT_POSITION : at, real(fd, parts, count, at, flags)); \
    }
WRAP_PREADV2(preadv2)
WRAP_PREADV2(preadv64v2)

/* Buffered reads: libc fills its buffer by calls of its own, so they are seen at this door. */
static void after_fread(struct entry *entry, int64_t start, int64_t at, int64_t size) {
    if (size <= 0)
        return;
    int kept_errno = errno;
    int64_t end = now();
    self.busy = 1;
    entry->position = -1; /* The buffer has moved it. */
    struct row *row = entry->row;
    if (may_extend(entry, READ, at, start) && row->size < 65536) {
        extend(entry, start, end, size);
    } else {
        row = add_row(READ, entry, start, end);
        if (row) {
            row->offset = at;
            row->size = size;
            row->wait = end - start;
        }
        commit(row);
        keep_open(entry, row, READ);
    }
    self.busy = 0;
    errno = kept_errno;
}

EXPORT size_t fread(void *to, size_t size, size_t count, FILE *file) {
    REAL(size_t, "fread", void *, size_t, size_t, FILE *);
    struct entry *entry = watched(fileno(file));
    if (!entry)
        return real(to, size, count, file);
    int64_t at = ftello64(file), start = now();
    size_t got = real(to, size, count, file);
    after_fread(entry, start, at, (int64_t)(got * size));
    return got;
}

EXPORT size_t __fread_chk(void *to, size_t limit, size_t size, size_t count, FILE *file) {
    REAL(size_t, "__fread_chk", void *, size_t, size_t, size_t, FILE *);
    struct entry *entry = watched(fileno(file));
    if (!entry)
        return real(to, limit, size, count, file);
    int64_t at = ftello64(file), start = now();
    size_t got = real(to, limit, size, count, file);
    after_fread(entry, start, at, (int64_t)(got * size));
    return got;
}

EXPORT ssize_t write(int fd, const void *from, size_t size_in) {
    REAL(ssize_t, "write", int, const void *, size_t);
    AROUND_WRITE(fd, AT_POSITION, real(fd, from, size_in));
}

EXPORT ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    AROUND_WRITE(fd, AT_POSITION, real(fd, parts, count));
}

#define WRAP_PWRITE(name)                                           \
    EXPORT ssize_t name(int fd, const void *from, size_t size_in, off64_t at) { \
        REAL(ssize_t, #name, int, const void *, size_t, off64_t);   \
        AROUND_WRITE(fd, at, real(fd, from, size_in, at));          \
    }
WRAP_PWRITE(pwrite)
WRAP_PWRITE(pwrite64)

/* The time that a flush takes belongs to the row of what was written. */
#define WRAP_SYNC(name)                                             \
    EXPORT int name(int fd) {                                       \
        REAL(int, #name, int);                                      \
        struct entry *entry = watched(fd);                          \
        int64_t start = now();                                      \
        int failed = real(fd);                                      \
        if (entry && entry->state == A_FILE && may_extend(entry, WRITE, -1, start)) \
            extend(entry, start, now(), 0);                         \
        return failed;                                              \
    }
WRAP_SYNC(fsync)
WRAP_SYNC(fdatasync)

static void *map(void *at, size_t size, int protection, int flags, int fd, off64_t offset) {
    void *got = (void *)syscall(SYS_mmap, at, size, protection, flags, fd, offset);
    if (fd < 0 || got == MAP_FAILED || (flags & MAP_ANONYMOUS) || (protection & PROT_EXEC))
        return got;
    struct entry *entry = watched(fd);
    if (entry && entry->state == A_FILE) {
        int kept_errno = errno;
        int64_t start = now();
        self.busy = 1;
        struct row *row = add_row(MAP, entry, start, start);
        if (row) {
            row->offset = offset;
            row->size = (int64_t)size;
        }
        commit(row);
        self.busy = 0;
        errno = kept_errno;
    }
    return got;
}

EXPORT void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    return map(at, size, protection, flags, fd, offset);
}

EXPORT void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t offset) {
    return map(at, size, protection, flags, fd, offset);
}

EXPORT ssize_t recv(int fd, void *to, size_t room, int flags) {
    REAL(ssize_t, "recv", int, void *, size_t, int);
    if (flags & MSG_PEEK)
        return real(fd, to, room, flags);
    AROUND_READ(ssize_t, fd, AT_POSITION, real(fd, to, room, flags));
}

EXPORT ssize_t __recv_chk(int fd, void *to, size_t room, size_t limit, int flags) {
    REAL(ssize_t, "__recv_chk", int, void *, size_t, size_t, int);
    if (flags & MSG_PEEK)
        return real(fd, to, room, limit, flags);
    AROUND_READ(ssize_t, fd, AT_POSITION, real(fd, to, room, limit, flags));
}

EXPORT ssize_t recvfrom(int fd, void *restrict to, size_t room, int flags,
                        struct sockaddr *restrict from, socklen_t *restrict from_size) {
    REAL(ssize_t, "recvfrom", int, void *, size_t, int, struct sockaddr *, socklen_t *);
    if (flags & MSG_PEEK)
        return real(fd, to, room, flags, from, from_size);
    AROUND_READ(ssize_t, fd, AT_POSITION, real(fd, to, room, flags, from, from_size));
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(ssize_t, "recvmsg", int, struct msghdr *, int);
    if (flags & MSG_PEEK)
        return real(fd, message, flags);
    AROUND_READ(ssize_t, fd, AT_POSITION, real(fd, message, flags));
}

EXPORT ssize_t send(int fd, const void *from, size_t size_in, int flags) {
    REAL(ssize_t, "send", int, const void *, size_t, int);
    AROUND_WRITE(fd, AT_POSITION, real(fd, from, size_in, flags));
}

EXPORT ssize_t sendto(int fd, const void *from, size_t size_in, int flags,
                      const struct sockaddr *to, socklen_t to_size) {
    REAL(ssize_t, "sendto", int, const void *, size_t, int, const struct sockaddr *, socklen_t);
    AROUND_WRITE(fd, AT_POSITION, real(fd, from, size_in, flags, to, to_size));
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(ssize_t, "sendmsg", int, const struct msghdr *, int);
    AROUND_WRITE(fd, AT_POSITION, real(fd, message, flags));
}

EXPORT int connect(int fd, const struct sockaddr *to, socklen_t size) {
    REAL(int, "connect", int, const struct sockaddr *, socklen_t);
    reset(fd);
    int is_internet = to && (to->sa_family == AF_INET || to->sa_family == AF_INET6);
    if (folder_bytes && !self.busy && is_internet && fd >= 0 && fd < NUM_DESCRIPTORS &&
        !is_torch(__builtin_return_address(0))) {
        self.busy = 1;
        connected(fd, to);
        self.busy = 0;
    }
    return real(fd, to, size);
}

#define WRAP_STAT(name, about_type)                                 \
    EXPORT int name(const char *path, about_type *about) {          \
        REAL(int, #name, const char *, about_type *);               \
        int64_t start = now();                                      \
        int failed = real(path, about);                             \
        looked_up(path, start, failed, !failed && S_ISDIR(about->st_mode)); \
        return failed;                                              \
    }
WRAP_STAT(stat, struct stat)
WRAP_STAT(lstat, struct stat)
WRAP_STAT(stat64, struct stat64)
WRAP_STAT(lstat64, struct stat64)

#define WRAP_STATAT(name, about_type)                               \
    EXPORT int name(int at, const char *path, about_type *about, int flags) { \
        REAL(int, #name, int, const char *, about_type *, int);     \
        int64_t start = now();                                      \
        int failed = real(at, path, about, flags);                  \
        looked_up(path, start, failed, !failed && S_ISDIR(about->st_mode)); \
        return failed;                                              \
    }
WRAP_STATAT(fstatat, struct stat)
WRAP_STATAT(fstatat64, struct stat64)

/* What programs call that were compiled against a glibc before 2.33. */
#define WRAP_XSTAT(name, about_type)                                \
    EXPORT int name(int version, const char *path, about_type *about) { \
        REAL(int, #name, int, const char *, about_type *);          \
        int64_t start = now();                                      \
        int failed = real(version, path, about);                    \
        looked_up(path, start, failed, !failed && S_ISDIR(about->st_mode)); \
        return failed;                                              \
    }
WRAP_XSTAT(__xstat, struct stat)
WRAP_XSTAT(__lxstat, struct stat)
WRAP_XSTAT(__xstat64, struct stat64)
WRAP_XSTAT(__lxstat64, struct stat64)

EXPORT DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    int64_t start = now();
    DIR *got = real(path);
    looked_up(path, start, !got, 0);
    return got;
}

/* ---- the interpreter's lock --------------------------------------------------------------- */

/* CPython (3.11 to 3.13) waits for its lock in pthread_cond_timedwait, called from its own code,
 * and hands it over in pthread_cond_wait; its other locks are semaphores. So a wait whose caller
 * lies inside the interpreter is a wait for the lock. */
static uintptr_t python_from, python_to;
static int python_state; /* 1: found */

static int note_python(struct dl_phdr_info *info, size_t size, void *symbol) {
    (void)size;
    uintptr_t from = UINTPTR_MAX, to = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD || !(info->dlpi_phdr[i].p_flags & PF_X))
            continue;
        uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        uintptr_t end = begin + info->dlpi_phdr[i].p_memsz;
        from = begin < from ? begin : from;
        to = end > to ? end : to;
    }
    if ((uintptr_t)symbol < from || (uintptr_t)symbol >= to)
        return 0;
    python_from = from;
    python_to = to;
    __atomic_store_n(&python_state, 1, __ATOMIC_RELEASE);
    return 1;
}

static void find_python(void) {
    void *symbol = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if (symbol)
        dl_iterate_phdr(note_python, symbol);
}

static int is_python(void *caller) {
    return __atomic_load_n(&python_state, __ATOMIC_ACQUIRE) && (uintptr_t)caller >= python_from &&
           (uintptr_t)caller < python_to;
}

/* Without a version dlsym may return the symbol of 2002, whose condition has another layout. */
static void *condition_function(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

#define COUNT_LOCK(call)                                            \
    if (!is_python(__builtin_return_address(0)))                    \
        return call;                                                \
    int64_t start = now();                                          \
    int result = call;                                              \
    self.lock_ns += now() - start;                                  \
    return result

static int (*real_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_wait)(pthread_cond_t *, pthread_mutex_t *);

static void find_waits(void) {
    real_timedwait = condition_function("pthread_cond_timedwait");
    real_wait = condition_function("pthread_cond_wait");
}

EXPORT int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                                  const struct timespec *until) {
    if (!real_timedwait)
        find_waits();
    COUNT_LOCK(real_timedwait(condition, mutex, until));
}

EXPORT int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
    if (!real_wait)
        find_waits();
    COUNT_LOCK(real_wait(condition, mutex));
}

EXPORT int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                                  clockid_t clock, const struct timespec *until) {
    REAL(int, "pthread_cond_clockwait", pthread_cond_t *, pthread_mutex_t *, clockid_t,
         const struct timespec *);
    COUNT_LOCK(real(condition, mutex, clock, until));
}

/* How long the calling thread has waited for the interpreter's lock; loop.py asks. */
EXPORT int64_t penstock_lock_wait_ns(void) {
    if (!python_state)
        find_python(); /* A program that loaded the interpreter when it was running. */
    return self.lock_ns;
}

/* Say which rank this process is of, where the environment did not know it. */
EXPORT void penstock_set_rank(int32_t rank) {
    rank_number = (uint32_t)rank;
    if (head)
        head->rank = rank_number;
}

/* ---- begin -------------------------------------------------------------------------------- */

static void in_child(void) {
    generation++;
    head = NULL;
    retry_ns = 0;
    self.busy = 0;
    self.lock_ns = 0;
    unlock(); /* A thread of the parent may have held it. */
}

__attribute__((constructor)) static void begin(void) {
    for (const struct wrapped *one = __start_penstock_wrapped; one < __stop_penstock_wrapped; one++)
        look_up(one);
    find_waits();
    find_python();
    const char *where = getenv("PENSTOCK_TRACE");
    if (!where || where[0] != '/' || strlen(where) >= sizeof folder)
        return; /* Nothing is recorded; the lock's waits are counted all the same. */
    const char *rank = getenv("PENSTOCK_RANK");
    rank = rank ? rank : getenv("RANK");
    rank_number = rank ? (uint32_t)atoi(rank) : 0;
    strcpy(folder, where);
    for (int fd = 0; fd < 3; fd++)
        table[fd].state = IGNORED; /* What a program prints is no data, wherever it goes. */
    pthread_atfork(NULL, NULL, in_child);
    folder_bytes = strlen(folder);
}
