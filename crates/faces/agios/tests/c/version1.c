/* The oldest interface: int results, struct client, queue ids on adding, six-argument release. */
#define AGIOS_API 1
#include "check.h"

static char a[] = "000000000000005";

static atomic_int entered;

static void one(void *data) {
    atomic_store(&entered, 1);
    while (atomic_load(&blocked)) sleep_ms(1);
    note(*(int *)data);
}

static void several(void **data, int count) {
    for (int i = 0; i < count; i++) note(*(int *)data[i]);
}

static void other(void *data) { note(-*(int *)data); }

int main(void) {
    struct client client = { one, several, NULL }, second = { other, NULL, NULL }, none = { NULL, NULL, NULL };
    start_over();
    int number[6] = { 0, 1, 2, 3, 4, 5 };
    CHECK(agios_add_request(a, RT_READ, 0, 10, &number[1], &client, 0) == -1);
    CHECK(agios_init(NULL, NULL, 2) == -1 && agios_init(&none, NULL, 2) == -1);
    CHECK(agios_init(&client, config("default_algorithm = \"SJF\""), 2) == 0);
    atomic_store(&blocked, 1);
    CHECK(agios_add_request(a, RT_READ, 500, 10, &number[0], &client, 0) == 0);
    for (int i = 0; i < 20000 && !atomic_load(&entered); i++) sleep_ms(1);
    CHECK(atomic_load(&entered));
    CHECK(agios_add_request(a, RT_READ, 20, 10, &number[2], &client, 1) == 0);
    CHECK(agios_add_request(a, RT_READ, 10, 10, &number[1], NULL, 0) == 0);
    CHECK(agios_add_request(a, RT_WRITE, 900, 10, &number[5], &client, 0) == 0);
    CHECK(agios_cancel_request(a, RT_WRITE, 10, 900) == 1 && agios_cancel_request(a, RT_WRITE, 10, 900) == 0);
    atomic_store(&blocked, 0);
    wait_served(3);
    CHECK(seen[0] == 0 && seen[1] == 1 && seen[2] == 2);
    CHECK(agios_add_request(a, RT_READ, 70, 10, &number[3], &second, 0) == 0);
    wait_served(4);
    CHECK(seen[3] == -3);
    CHECK(agios_release_request(a, RT_READ, 10, 10, 0, 10) == 1);
    CHECK(agios_release_request(a, RT_READ, 10, 10, 0, 10) == 0);
    agios_print_stats_file("stats.txt");
    char text[1000] = "";
    FILE *f = fopen("stats.txt", "r");
    CHECK(f && fread(text, 1, sizeof text - 1, f) > 0 && fclose(f) == 0);
    CHECK(strstr(text, "requests\t5\n") && strstr(text, "bytes released\t10\n"));
    agios_reset_stats();
    agios_exit();
    CHECK(agios_release_request(a, RT_READ, 10, 20, 0, 10) == 0);
    /* Application ids go up to the largest, and TW takes any. */
    start_over();
    CHECK(agios_init(&client, config("default_algorithm = \"EXCLUSIVE_TIME_WINDOW\" exclusive_tw_window_duration = 100"), 2) == 0);
    for (int id = 0; id <= 2; id++) CHECK(agios_add_request(a, RT_READ, id * 100, 10, &number[id], &client, id) == 0);
    CHECK(agios_add_request(a, RT_READ, 300, 10, &number[3], &client, 3) == -1);
    wait_served(3);
    agios_exit();
    start_over();
    CHECK(agios_init(&client, config("default_algorithm = \"TW\""), 0) == 0);
    for (int id = 0; id <= 2; id++) CHECK(agios_add_request(a, RT_READ, id * 100, 10, &number[id], &client, id) == 0);
    wait_served(3);
    agios_exit();
    puts("ok");
    return 0;
}
