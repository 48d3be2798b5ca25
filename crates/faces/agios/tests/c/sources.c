/* Sources of every public version compile: each number of arguments that a function had, and functions as values. Compiled as
 * C and as C++, with -DAGIOS_API=1, 2, 3; nothing is included that the public header did not include. */
#include <agios.h>

pthread_mutex_t from_the_header = PTHREAD_MUTEX_INITIALIZER;
struct timespec from_its_headers;

static char name[] = "file";

#if AGIOS_API == 1

static int data = 1;
static void one(void *of) { pthread_mutex_lock(&from_the_header); data += *(int *)of; pthread_mutex_unlock(&from_the_header); }
static struct client client = { one, 0, 0 };

int main(void)
{
    int (*release)(char *, short int, long int, long int) = agios_release_request;
    int (*add)(char *, short int, long int, long int, void *, struct client *, int) = agios_add_request;
    int wrong = agios_init(&client, 0, 3) != 0;
    agios_exit();
    wrong += 2 * (agios_init(&client, 0) != 0);
    agios_wait_predict_init();
    wrong += 4 * (agios_set_stripe_size(name, 65536) != 1);
    wrong += 8 * (agios_add_request(name, RT_READ, 0, 10, &data, &client, 0) != 0);
    wrong += 8 * (agios_add_request(name, RT_READ, 10, 10, &data, &client) != 0);
    wrong += 8 * (add(name, RT_READ, 20, 10, &data, &client, 0) != 0);
    while (1) {
        from_its_headers.tv_nsec = 100000;
        nanosleep(&from_its_headers, 0);
        pthread_mutex_lock(&from_the_header);
        int all = data > 7;
        pthread_mutex_unlock(&from_the_header);
        if (all) break;
    }
    wrong += 16 * (agios_release_request(name, RT_READ, 10, 0) != 1);
    wrong += 16 * (agios_release_request(name, RT_READ, 10, 10, 0, 10) != 1);
    wrong += 16 * (release(name, RT_READ, 10, 20) != 1);
    wrong += 32 * (agios_cancel_request(name, RT_READ, 10, 0) != 0);
    agios_exit();
    return wrong;
}

#else

static void *one(int64_t id) { (void)id; return 0; }

#if AGIOS_API == 2

int main(void)
{
    bool (*add)(char *, int32_t, int64_t, int64_t, int64_t, int32_t) = agios_add_request;
    return !agios_init(one, 0, 0, 0) + 2 * !agios_add_request(name, RT_READ, 0, 10, 1, 0) +
           4 * !add(name, RT_WRITE, 0, 10, 1, 0) + (agios_exit(), 0);
}

#else

static void *own(int64_t id, void *argument) { (void)id; return argument; }

int main(void)
{
    bool (*add)(char *, int32_t, int64_t, int64_t, int64_t, int32_t, void *(*)(int64_t, void *), void *) = agios_add_request;
    return !agios_init(0, 0, 0, 0) + 2 * !agios_add_request(name, RT_READ, 0, 10, 1, 0, own, 0) +
           4 * !agios_add_request(name, RT_READ, 10, 10, 1, 0, one) + 8 * !add(name, RT_READ, 20, 10, 1, 0, own, 0) +
           (agios_exit(), 0);
}

#endif
#endif
