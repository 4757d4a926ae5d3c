/* Any other library of the driver: one function, named by -DSYMBOL, so that loading and calling it proves something.
 * It needs no C library: it loads under every loader of its machine. */
int SYMBOL(void);

int SYMBOL(void)
{
    return 1;
}
