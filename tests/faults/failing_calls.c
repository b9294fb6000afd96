// Preloaded into a command: its n-th call that changes files below a folder fails, or the process kills itself there.
// FAILING_CALLS is "<folder>|<calls>|<n>|<errno>|<mode>": calls is a comma-separated list of names below or "all";
// mode is "once", "on" (all later calls that need space fail too, like a full disk), "kill" (SIGKILL before the call), or
// "list" (none fails). FAILING_CALLS_LOG is a file that gets a line for the call that failed, with "list" for every call.
// Without FAILING_CALLS nothing happens.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], calls[256], mode[8];
static long wanted, code;
static long *done;  // shared with forked processes

void failing_calls_arm(void) {
  const char *spec = getenv("FAILING_CALLS");
  wanted = 0;
  if (spec == NULL || sscanf(spec, "%4095[^|]|%255[^|]|%ld|%ld|%7s", folder, calls, &wanted, &code, mode) != 5) return;
  done = mmap(NULL, sizeof *done, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

__attribute__((constructor)) static void load(void) { failing_calls_arm(); }

static int is_below(const char *path) {
  size_t length = strlen(folder);
  return !strncmp(path, folder, length) && (path[length] == '/' || path[length] == 0);
}

static int is_counted(const char *call) {
  if (!strcmp(calls, "all")) return 1;
  const char *found = strstr(calls, call);
  size_t length = strlen(call);
  return found && (found == calls || found[-1] == ',') && (found[length] == 0 || found[length] == ',');
}

static void report(const char *call, const char *path) {
  const char *file = getenv("FAILING_CALLS_LOG");
  if (file == NULL) return;
  char line[PATH_MAX + 64];
  int length = snprintf(line, sizeof line, "%s %s\n", call, path);
  int fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND, 0600);
  syscall(SYS_write, fd, line, length);
  syscall(SYS_close, fd);
}

// Whether this call fails. In mode "on", calls that give nothing new to the disk succeed after the first failure.
static int fails_at(const char *call, const char *path, int needs_space) {
  if (!is_below(path) || !is_counted(call)) return 0;
  long number = __atomic_add_fetch(done, 1, __ATOMIC_SEQ_CST);
  if (!strcmp(mode, "list")) report(call, path);
  int is_later = !strcmp(mode, "on") && number > wanted && needs_space;
  if (!strcmp(mode, "list") || (number != wanted && !is_later)) return 0;
  if (number == wanted) report(call, path);
  if (!strcmp(mode, "kill")) syscall(SYS_kill, getpid(), SIGKILL);
  errno = (int)code;
  return 1;
}

static int fails_path(const char *call, int at, const char *path, int needs_space) {
  if (!wanted || path == NULL) return 0;
  char whole[2 * PATH_MAX], link[64];
  if (path[0] == '/') return fails_at(call, path, needs_space);
  ssize_t length;
  if (at == AT_FDCWD) {
    if (getcwd(whole, PATH_MAX) == NULL) return 0;
    length = strlen(whole);
  } else {
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    if ((length = readlink(link, whole, PATH_MAX - 1)) < 0) return 0;
  }
  snprintf(whole + length, PATH_MAX, "/%s", path);
  return fails_at(call, whole, needs_space);
}

static int fails_fd(const char *call, int fd, int needs_space) {
  if (!wanted) return 0;
  int before = errno;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  errno = before;
  if (length < 0) return 0;
  path[length] = 0;
  return fails_at(call, path, needs_space);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define ON_FD(result, name, call, needs_space, parameters, arguments) \
  result name parameters { \
    REAL(name); \
    return fails_fd(call, fd, needs_space) ? -1 : real arguments; \
  }
#define ON_PATH(result, name, call, at, path, needs_space, parameters, arguments) \
  result name parameters { \
    REAL(name); \
    return fails_path(call, at, path, needs_space) ? -1 : real arguments; \
  }

ON_FD(ssize_t, write, "write", 1, (int fd, const void *from, size_t size), (fd, from, size))
ON_FD(ssize_t, writev, "write", 1, (int fd, const struct iovec *from, int count), (fd, from, count))
ON_FD(ssize_t, pwrite, "pwrite", 1, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
ON_FD(ssize_t, pwrite64, "pwrite", 1, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at))
ON_FD(ssize_t, pwritev, "pwrite", 1, (int fd, const struct iovec *from, int count, off_t at), (fd, from, count, at))
ON_FD(ssize_t, pwritev64, "pwrite", 1, (int fd, const struct iovec *from, int count, off64_t at), (fd, from, count, at))
ON_FD(ssize_t, sendfile, "write", 1, (int fd, int in, off_t *at, size_t size), (fd, in, at, size))
ON_FD(ssize_t, sendfile64, "write", 1, (int fd, int in, off64_t *at, size_t size), (fd, in, at, size))
ON_FD(ssize_t, copy_file_range, "write", 1,
      (int in, off64_t *from, int fd, off64_t *to, size_t size, unsigned flags), (in, from, fd, to, size, flags))
ON_FD(int, fsync, "fsync", 0, (int fd), (fd))
ON_FD(int, fdatasync, "fsync", 0, (int fd), (fd))
ON_FD(int, ftruncate, "ftruncate", 1, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, "ftruncate", 1, (int fd, off64_t size), (fd, size))
ON_PATH(int, mkdir, "mkdir", AT_FDCWD, path, 1, (const char *path, mode_t bits), (path, bits))
ON_PATH(int, mkdirat, "mkdir", at, path, 1, (int at, const char *path, mode_t bits), (at, path, bits))
ON_PATH(int, rename, "rename", AT_FDCWD, to, 0, (const char *from, const char *to), (from, to))
ON_PATH(int, renameat, "rename", at, to, 0, (int of, const char *from, int at, const char *to), (of, from, at, to))
ON_PATH(int, renameat2, "rename", at, to, 0,
        (int of, const char *from, int at, const char *to, unsigned flags), (of, from, at, to, flags))

// posix_fallocate returns the error instead of setting errno.
int posix_fallocate(int fd, off_t at, off_t size) {
  REAL(posix_fallocate);
  return fails_fd("ftruncate", fd, 1) ? (int)code : real(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
  REAL(posix_fallocate64);
  return fails_fd("ftruncate", fd, 1) ? (int)code : real(fd, at, size);
}

#define OPENS(name, at, leading, arguments) \
  int name(leading const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t bits = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    return flags & O_CREAT && fails_path("open", at, path, 1) ? -1 : real arguments; \
  }
#define AT int at,
#define NO_AT
OPENS(open, AT_FDCWD, NO_AT, (path, flags, bits))
OPENS(open64, AT_FDCWD, NO_AT, (path, flags, bits))
OPENS(openat, at, AT, (at, path, flags, bits))
OPENS(openat64, at, AT, (at, path, flags, bits))

FILE *fopen(const char *path, const char *how) {
  REAL(fopen);
  return strpbrk(how, "wa") && fails_path("open", AT_FDCWD, path, 1) ? NULL : real(path, how);
}
FILE *fopen64(const char *path, const char *how) {
  REAL(fopen64);
  return strpbrk(how, "wa") && fails_path("open", AT_FDCWD, path, 1) ? NULL : real(path, how);
}
size_t fwrite(const void *from, size_t size, size_t count, FILE *file) {
  REAL(fwrite);
  return fails_fd("write", fileno(file), 1) ? 0 : real(from, size, count, file);
}
