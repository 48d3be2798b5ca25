/* A program as it was written for a public version of AGIOS (-DGENERATION=1, 2, 3, or 30: the development branch before
 * callbacks had an argument), with that version's own declarations: it asks for the plain names, whatever library it finds.
 * Ends with 0 when it was served, with 3 when agios_init failed, with 4 when a request was refused, with 5 when it was not
 * served. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifndef CONFIG
#define CONFIG "agios.conf"
#endif
#ifndef PATIENCE_MS
#define PATIENCE_MS 10000
#endif

static volatile int served;

static void wait_for(int count)
{
    struct timespec t = { 0, 1000000 };
    for (int i = 0; i < PATIENCE_MS && served < count; i++) nanosleep(&t, NULL);
    if (served < count) exit(5);
}

static char name[] = "file";

#if GENERATION == 1

struct client {
    void (*process_request)(void *);
    void (*process_requests)(void **, int);
    int (*is_dev_idle)(void);
};
int agios_init(struct client *, char *, int);
void agios_exit(void);
int agios_add_request(char *, short int, long int, long int, void *, struct client *, int);
int agios_release_request(char *, short int, long int, long int);
int agios_set_stripe_size(char *, int);
void agios_wait_predict_init(void);

static void one(void *data) { served += *(int *)data; }

static struct client client = { one, NULL, NULL };

int main(void)
{
    int number = 1;
    if (agios_init(&client, "agios.conf", 0) != 0) return 3;
    agios_wait_predict_init();
    if (agios_set_stripe_size(name, 32768) != 1) return 4;
    if (agios_add_request(name, 0, 0, 10, &number, &client, 0) != 0) return 4;
    wait_for(1);
    if (agios_release_request(name, 0, 10, 0) != 1) return 4;
    agios_exit();
    return 0;
}

#else

bool agios_init(void *one(int64_t), void *several(int64_t *, int32_t), char *, int32_t);
void agios_exit(void);
bool agios_release_request(char *, int32_t, int64_t, int64_t);

#if GENERATION == 2

bool agios_add_request(char *, int32_t, int64_t, int64_t, int64_t, int32_t);

static void *one(int64_t id)
{
    served += (int)id;
    return NULL;
}

int main(void)
{
    if (!agios_init(one, NULL, "agios.conf", 0)) return 3;
    if (!agios_add_request(name, 0, 0, 10, 1, 0)) return 4;
    wait_for(1);
    if (!agios_release_request(name, 0, 10, 0)) return 4;
    agios_exit();
    return 0;
}

#elif GENERATION == 3

bool agios_add_request(char *, int32_t, int64_t, int64_t, int64_t, int32_t, void *own(int64_t, void *), void *);

static void *own(int64_t id, void *argument)
{
    served += (int)id * *(int *)argument;
    return NULL;
}

int main(void)
{
    int factor = 1;
    if (!agios_init(NULL, NULL, CONFIG, 0)) return 3;
    if (!agios_add_request(name, 0, 0, 10, 1, 0, own, &factor)) return 4;
    wait_for(1);
    if (!agios_release_request(name, 0, 10, 0)) return 4;
    agios_exit();
    return 0;
}

#else

bool agios_add_request(char *, int32_t, int64_t, int64_t, int64_t, int32_t, void *own(int64_t));

static void *own(int64_t id)
{
    served += (int)id;
    return NULL;
}

int main(void)
{
    if (!agios_init(NULL, NULL, CONFIG, 0)) return 3;
    if (!agios_add_request(name, 0, 0, 10, 1, 0, own)) return 4;
    wait_for(1);
    if (!agios_release_request(name, 0, 10, 0)) return 4;
    agios_exit();
    return 0;
}

#endif
#endif
