/* Exchanges pairs of names as fast as it can, until it is killed: what a container does that shares files with one
   that is being started.

   usage: swapper FOLDER NAME NAME [FOLDER NAME NAME ...]

   Folders are opened once, so that an exchange of one does not lead the others astray. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST_PAIRS 32
#ifndef RENAME_EXCHANGE
#define RENAME_EXCHANGE 2
#endif

int main(int count, char **words)
{
    int folders[MOST_PAIRS];
    int pairs = (count - 1) / 3;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (pairs < 1 || pairs > MOST_PAIRS || count != 1 + 3 * pairs)
        return 2;
    for (int i = 0; i < pairs; i++) {
        folders[i] = open(words[1 + 3 * i], O_PATH | O_DIRECTORY);
        if (folders[i] < 0) {
            perror(words[1 + 3 * i]);
            return 1;
        }
    }
    puts("ready");
    fflush(stdout);
    for (unsigned turn = 0;; turn++) {
        /* Not all pairs in step: each stands still for a while now and then. */
        int i = rand_r(&turn) % pairs;
        syscall(SYS_renameat2, folders[i], words[2 + 3 * i], folders[i], words[3 + 3 * i], RENAME_EXCHANGE);
    }
}
