/* timed RESULT INPUT COMMAND...: runs the command once, with the bytes of the file INPUT in a pipe as its standard
 * input, as container runtimes call hooks. Writes "NANOSECONDS KIB STATUS" to RESULT: wall clock from before the start
 * until it has been waited for, peak resident memory, exit status.
 *
 * A small program of its own because the kernel counts the memory of whoever starts a process among that process's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void check(int failure, const char *what)
{
    if (failure) {
        fprintf(stderr, "timed: %s: %s\n", what, strerror(failure));
        exit(125);
    }
}

static int checked(int result, const char *what)
{
    check(result < 0 ? errno : 0, what);
    return result;
}

static int pipe_with(const char *path)
{
    static char bytes[4096]; /* less than a pipe holds, so that nobody has to write while the command runs */
    int ends[2];
    const int file = checked(open(path, O_RDONLY), path);
    const int count = checked(read(file, bytes, sizeof bytes), path);
    check(count == sizeof bytes ? EFBIG : 0, path);
    checked(pipe2(ends, O_CLOEXEC), "pipe");
    checked(write(ends[1], bytes, count), "pipe");
    close(ends[1]);
    close(file);
    return ends[0];
}

int main(int count, char **arguments)
{
    extern char **environ;
    struct timespec start, end;
    struct rusage usage;
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status;

    check(count < 4 ? EINVAL : 0, "timed RESULT INPUT COMMAND...");
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe_with(arguments[2]), 0);
    clock_gettime(CLOCK_MONOTONIC, &start);
    check(posix_spawn(&child, arguments[3], &actions, NULL, arguments + 3, environ), arguments[3]);
    checked(wait4(child, &status, 0, &usage), "wait4");
    clock_gettime(CLOCK_MONOTONIC, &end);
    const long long nanoseconds = (end.tv_sec - start.tv_sec) * 1000000000LL + end.tv_nsec - start.tv_nsec;
    FILE *result = fopen(arguments[1], "w");
    check(result ? 0 : errno, arguments[1]);
    fprintf(result, "%lld %ld %d\n", nanoseconds, usage.ru_maxrss, WIFEXITED(status) ? WEXITSTATUS(status) : 126);
    return fclose(result) ? 125 : 0;
}
