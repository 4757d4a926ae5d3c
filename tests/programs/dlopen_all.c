/*
 * Opens each library named on the command line the way a program does, and says what the loader made of it.
 *
 *     dlopen_all NAME...
 *
 * One line of output per name, in order: "NAME<tab>PATH" with the file that was loaded, or "NAME<tab>!<tab>REASON".
 * Exit status 0 when every name was found, else 1.
 *
 * Each library is closed before the next is opened: one that stays loaded would answer for a later name that is its SONAME.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

static int open_one(const char *name)
{
    void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    struct link_map *map = NULL;

    if (library == NULL || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) {
        printf("%s\t!\t%s\n", name, dlerror());
        return 1;
    }
    printf("%s\t%s\n", name, map->l_name);
    dlclose(library);
    return 0;
}

int main(int argc, char **argv)
{
    int failed = 0;

    for (int i = 1; i < argc; i++)
        failed |= open_one(argv[i]);
    return failed;
}
