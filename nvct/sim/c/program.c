/* Any other program of the driver: says its name and that it is simulated. */
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
    printf("%s of a simulated node\n", slash ? slash + 1 : argc > 0 ? argv[0] : "?");
    return 0;
}
