/* Says which line went wrong, and ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(x)                                                                                                       \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            printf("line %d: %s (errno %d)\n", __LINE__, #x, errno);                                                   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#endif
