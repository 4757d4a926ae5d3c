/*
 * Says which devices the device cgroup lets this container use, whatever nodes the container was given.
 *
 *     open_devices MAJOR:MINOR...
 *
 * For each number it makes a node of its own, as a program does that wants a neighbour's GPU, and opens it for reading and
 * for both. One line of output per number, in order: "MAJOR:MINOR" and then "yes", "no" (EPERM both times), or what else
 * happened. ENXIO means that the cgroup let it through and no driver is behind the number.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static const char PROBE[] = "/dev/nvct-test-probe";

static int error_of_open(int flags)
{
    const int descriptor = open(PROBE, flags | O_NONBLOCK | O_CLOEXEC);

    if (descriptor < 0)
        return errno;
    close(descriptor);
    return 0;
}

static const char *answer(unsigned int major, unsigned int minor)
{
    unlink(PROBE);
    if (mknod(PROBE, S_IFCHR | 0600, makedev(major, minor)) != 0)
        return strerror(errno);
    const int reading = error_of_open(O_RDONLY), both = error_of_open(O_RDWR);
    unlink(PROBE);
    if (reading == EPERM && both == EPERM)
        return "no";
    if ((reading == 0 || reading == ENXIO) && (both == 0 || both == ENXIO))
        return "yes";
    return strerror(reading == EPERM ? both : reading);
}

int main(int argc, char **argv)
{
    unsigned int major, minor;

    for (int i = 1; i < argc; i++) {
        if (sscanf(argv[i], "%u:%u", &major, &minor) != 2)
            return 2;
        printf("%s %s\n", argv[i], answer(major, minor));
    }
    return 0;
}
